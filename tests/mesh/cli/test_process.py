"""Processes of the local mesh: watched, restarted, stopped, and never left behind."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mesh.cli.plan import ProcessSpec
from mesh.cli.process import ManagedProcess, StartFailed, ending
from mesh.cli.supervisor import unread_variables

Eventually = Callable[..., Awaitable[object]]
FOREVER = "import signal; print('up', flush=True); signal.pause()"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def program(code: str) -> ProcessSpec:
    return ProcessSpec(role="scheduler", index=0, argv=[sys.executable, "-c", code])


async def never_up(spec: ProcessSpec) -> bool:
    return False


async def says_up(spec: ProcessSpec) -> bool:
    return spec.log.exists() and "up" in spec.log.read_text()


async def test_a_process_that_dies_is_started_again(eventually: Eventually) -> None:
    changes = []
    process = ManagedProcess(program(FOREVER), says_up, lambda: changes.append(process.phase), restart=True)
    running = asyncio.ensure_future(process.run())
    await eventually(process.ready.is_set)
    first = process.state().pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: process.restarts == 1 and process.ready.is_set())
    assert process.state().pid != first
    await process.stop(5)
    await running
    assert process.state().pid is None
    assert changes[0] == "starting"
    assert changes[-1] == "stopped"


async def test_a_process_that_never_comes_up_fails_with_the_end_of_its_log() -> None:
    process = ManagedProcess(program("raise SystemExit('no weights here')"), says_up, lambda: None, restart=True)
    with pytest.raises(StartFailed, match="no weights here"):
        await process.run()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ([("info", "listening"), ("error", "SHOAL_GATEWAY_PORT: taken")], "error: SHOAL_GATEWAY_PORT: taken"),
        ([("warning", "no such variable"), ("error", "E")], "warning: no such variable\nerror: E"),
        ([("info", "listening")], "info: listening"),
    ],
)
async def test_settings_that_cannot_be_used_fail_at_the_first_start_in_words(
    log: list[tuple[str, str]], said: str
) -> None:
    lines = "\n".join(json.dumps({"level": level, "message": message}) for level, message in log)
    process = ManagedProcess(program(f"print({lines!r}); raise SystemExit(2)"), says_up, lambda: None, restart=True)
    with pytest.raises(StartFailed) as caught:
        await process.run()
    assert str(caught.value) == f"scheduler-0 cannot use its settings:\n{said}"
    assert process.restarts == 0


async def test_only_the_last_start_of_a_process_is_quoted() -> None:
    program("").log.parent.mkdir(parents=True)
    program("").log.write_text("of an earlier mesh\n")
    process = ManagedProcess(program("raise SystemExit('no weights here')"), says_up, lambda: None, restart=False)
    with pytest.raises(StartFailed) as caught:
        await process.run()
    assert str(caught.value) == "scheduler-0 ended before it was ready:\nno weights here"


async def test_a_process_that_ignores_sigterm_is_killed_when_its_grace_is_over(eventually: Eventually) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: {FOREVER}"
    process = ManagedProcess(program(stubborn), says_up, lambda: None, restart=True)
    running = asyncio.ensure_future(process.run())
    await eventually(process.ready.is_set)
    pid = process.state().pid
    assert await process.stop(0.2) is False
    await running
    assert not psutil.pid_exists(pid or 0)


async def test_a_kill_ends_a_draining_process_and_its_own_children_at_once(eventually: Eventually) -> None:
    ignore = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = "import signal; signal.pause()"
    code = f"{ignore}\nprint('up', subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\nsignal.pause()"
    process = ManagedProcess(program(code), says_up, lambda: None, restart=True)
    running = asyncio.ensure_future(process.run())
    await eventually(process.ready.is_set)
    grandchild = psutil.Process(int(process.spec.log.read_text().split()[1]))
    stopping = asyncio.ensure_future(process.stop(60))
    await eventually(lambda: process.phase == "stopping")
    process.kill()
    async with asyncio.timeout(5):
        assert await stopping is False
        await running
    await eventually(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


async def test_stopping_in_the_middle_of_a_back_off_ends_at_once(eventually: Eventually) -> None:
    once = "import pathlib, sys; print('up', flush=True); import time; time.sleep(0.3)"
    process = ManagedProcess(program(once), says_up, lambda: None, restart=True)
    running = asyncio.ensure_future(process.run())
    await eventually(lambda: process.phase == "restarting")
    await process.stop(5)
    async with asyncio.timeout(2):
        await running


SUPERVISOR = """
import asyncio, sys
from mesh.cli.plan import ProcessSpec
from mesh.cli.process import ManagedProcess

async def never(spec): return False

async def main():
    spec = ProcessSpec(role="worker", index=0, argv=[sys.executable, "-c", "import signal; signal.pause()"])
    process = ManagedProcess(spec, never, lambda: print(process.state().pid, flush=True), restart=True)
    await process.run()

asyncio.run(main())
"""


async def test_children_end_when_their_supervisor_is_killed(eventually: Eventually) -> None:
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert psutil.pid_exists(child)
        supervisor.kill()
    await eventually(lambda: not psutil.pid_exists(child))


async def test_the_record_tells_a_process_s_life_with_its_pids(
    eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.supervisor")
    process = ManagedProcess(program(FOREVER), says_up, lambda: None, restart=True)
    running = asyncio.ensure_future(process.run())
    await eventually(process.ready.is_set)
    first = process.state().pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: process.state().why == "ended by SIGKILL")
    assert process.state().state == "restarting"
    await eventually(lambda: process.restarts == 1 and process.ready.is_set())
    assert process.state().why == ""
    second = process.state().pid
    await process.stop(5)
    await running
    again = next(line for line in caplog.messages if "again" in line)
    assert again.startswith("scheduler-0 is started again in 0.")
    assert [line for line in caplog.messages if line != again] == [
        f"scheduler-0 started (pid {first})",
        f"scheduler-0 is ready (pid {first})",
        f"scheduler-0 ended by SIGKILL (pid {first})",
        f"scheduler-0 started (pid {second})",
        f"scheduler-0 is ready (pid {second})",
        f"scheduler-0 stopped: ended by SIGTERM (pid {second})",
    ]


def test_an_ending_names_the_signal_or_the_exit_code() -> None:
    assert ending(-9) == "ended by SIGKILL"
    assert ending(3) == "ended with exit code 3"
    assert ending(-40) == "ended by signal 40"


async def test_a_variable_that_nothing_reads_is_told_once_with_the_best_guess() -> None:
    said = "SHOAL_MODLE is set but nothing reads it"
    code = f"print({said!r}); print('{{{said}; did you mean SHOAL_MODEL?}}'); print('up', flush=True)"
    specs = [replace(program(code), index=index) for index in range(2)]
    told = [ManagedProcess(spec, never_up, lambda: None, restart=False) for spec in specs]
    for process in told:
        with pytest.raises(StartFailed):
            await process.run()
    assert unread_variables(told) == [f"{said}; did you mean SHOAL_MODEL?"]


async def test_a_process_that_finds_its_port_taken_at_first_is_started_again_on_another(
    eventually: Eventually,
) -> None:
    code = "import os, signal\nif os.environ['PORT'] == '1': raise SystemExit('cannot listen on 127.0.0.1:1: taken')\n"
    taken = replace(program(code + FOREVER), ports={"grpc": 1}, env={"PORT": "1"})
    changes: list[int] = []

    def move(spec: ProcessSpec) -> ProcessSpec:
        return replace(spec, ports={"grpc": 2}, env={"PORT": "2"})

    process = ManagedProcess(
        taken, says_up, lambda: changes.append(process.spec.ports["grpc"]), restart=False, move=move
    )
    running = asyncio.ensure_future(process.run())
    await eventually(process.ready.is_set)
    assert (process.state().ports, process.restarts) == ({"grpc": 2}, 0)
    assert 2 in changes
    await process.stop(5)
    await running


async def test_a_process_that_finds_every_port_taken_fails_and_says_so() -> None:
    words = "cannot listen on 127.0.0.1:1: Address already in use"
    process = ManagedProcess(
        program(f"import sys; print({words!r}); sys.exit(2)"),
        says_up,
        lambda: None,
        restart=True,
        move=lambda spec: spec,
    )
    with pytest.raises(StartFailed) as caught:
        await process.run()
    assert str(caught.value) == f"scheduler-0 finds its ports taken by other programs:\n{words}"
