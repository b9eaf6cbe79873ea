"""The socket of a running mesh: for its owner alone, and work that was accepted outlives who asked for it."""

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from mesh.cli import control
from mesh.cli.control import Accepted, Done, Progress, Refused, Reply, Scale
from mesh.cli.state import run_dir

Eventually = Callable[..., Awaitable[object]]
SOCKET = "control.sock"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Deeper than a Unix address can name."""
    home = tmp_path / ("deep" * 20) / ("deeper" * 20)
    monkeypatch.setenv("SHOAL_HOME", str(home))
    return home


class Mesh:
    """Carries requests out when it is told to."""

    def __init__(self) -> None:
        self.heard: list[Scale] = []
        self.go = asyncio.Event()
        self.done = 0

    async def handle(self, request: Scale, say: control.Say) -> None:
        self.heard.append(request)
        say(Accepted())
        say(Progress("worker-1", "starting"))
        await self.go.wait()
        say(Done({"worker": 2}))
        self.done += 1


@pytest.fixture
async def mesh(eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setattr(control, "MOST_CLIENTS", 2)
    mesh = Mesh()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(control.serve(mesh.handle))
        await eventually(lambda: (run_dir() / SOCKET).exists())
        yield mesh
        serving.cancel()
    assert not (run_dir() / SOCKET).exists()


def replies(request: bytes) -> list[Reply]:
    with control._address() as address, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(address)
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return [msgspec.json.decode(line, type=Reply) for line in connection.makefile("rb")]


async def test_a_request_is_answered_step_by_step_to_its_end(mesh: Mesh) -> None:
    mesh.go.set()
    asked = Scale({"worker": 2}, timeout_s=7)
    told = await asyncio.to_thread(lambda: list(control.ask(asked)))
    assert told == [Accepted(), Progress("worker-1", "starting"), Done({"worker": 2})]
    assert mesh.heard == [asked]


async def test_only_the_owner_may_open_the_socket(mesh: Mesh) -> None:
    assert stat.S_IMODE((run_dir() / SOCKET).stat().st_mode) == 0o600


async def test_work_goes_on_when_who_asked_for_it_leaves(mesh: Mesh, eventually: Eventually) -> None:
    def ask_and_leave() -> Reply:
        asking = control.ask(Scale({"worker": 2}))
        first = next(asking)
        asking.close()
        return first

    assert await asyncio.to_thread(ask_and_leave) == Accepted()
    mesh.go.set()
    await eventually(lambda: mesh.done)


NO_REQUESTS = (
    b"",
    b"\n",
    b"scale\n",
    b'{"type": "stop"}\n',
    b'{"type": "scale"}\n',
    b'{"type": "scale", "wanted": {"worker": "2"}}\n',
    b'{"type": "scale", "wanted": {}, "more": 1}\n',
    b"x" * 200_000,
)


@pytest.mark.parametrize("request_", NO_REQUESTS)
async def test_what_is_no_request_is_refused_and_the_next_one_is_heard(mesh: Mesh, request_: bytes) -> None:
    [refused] = await asyncio.to_thread(replies, request_)
    assert isinstance(refused, Refused)
    assert mesh.heard == []
    mesh.go.set()
    assert (await asyncio.to_thread(lambda: list(control.ask(Scale({"worker": 2})))))[-1] == Done({"worker": 2})


async def test_more_clients_than_a_mesh_serves_wait_for_their_turn(mesh: Mesh, eventually: Eventually) -> None:
    def ask() -> Reply:
        return list(control.ask(Scale({"worker": 2})))[-1]

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(asyncio.to_thread(ask)) for _ in range(4)]
        await eventually(lambda: len(mesh.heard) == 2)
        mesh.go.set()
    assert {task.result().counts["worker"] for task in asking} == {2}


def test_without_a_mesh_there_is_nobody_to_ask() -> None:
    with pytest.raises(OSError, match="No such file"):
        next(control.ask(Scale({"worker": 2})))


def test_a_supervisor_that_says_nothing_is_waited_for_no_longer_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FIRST_REPLY_S", 0.05)
    with control._listening(), pytest.raises(TimeoutError):
        next(control.ask(Scale({"worker": 2})))
