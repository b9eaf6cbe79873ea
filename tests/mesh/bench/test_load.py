"""The load generator against a server that streams well and badly: what it counts, and what it says of itself."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mesh.bench.http_target import models_at
from mesh.bench.load import measure
from mesh.bench.report import CannotMeasure

from .conftest import Handler


def values(report) -> dict[str, float]:
    return {row.metric: row.value for row in report.rows}


def test_a_closed_loop_counts_answers_tokens_and_latencies(plan, server):
    report = measure(plan(), "shoal bench load")
    found = values(report)
    assert found["whole answers"] == 6
    assert found["errors"] == 0
    assert found["answer, median"] == 5
    assert found["prompt, median as the server counts"] == 7
    assert 0 < found["first token, p50"] <= found["first token, p99"] <= found["whole answer, p99"]
    assert found["output tokens"] == pytest.approx(5 * found["requests"])
    assert found["load generator CPU per token"] > 0
    assert report.exit_code == 0


def test_each_request_asks_for_a_whole_answer_and_no_two_are_alike(plan, server):
    measure(plan(), "")
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 6
    assert all(body["max_tokens"] == 5 and body["ignore_eos"] and body["stream"] for body in server.bodies)


def test_connections_are_kept(plan, server):
    measure(plan(), "")
    assert len(server.connections) == 2


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("busy", "http 503"),
        ("breaks", "broken stream"),
        ("short", "short answer"),
        ("inband", "in-band worker_lost"),
        ("nodone", "no [DONE]"),
        ("garbled", "malformed event"),
        ("empty", "empty answer"),
        ("hangs", "timeout"),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error_of_its_kind(plan, model, kind):
    report = measure(plan(model=model, requests=2, timeout_s=0.5), "")
    found = values(report)
    assert found["errors"] == found[f"errors: {kind}"] == 2
    assert found["whole answers"] == found["output tokens"] == 0
    assert report.exit_code == 1


def test_a_short_answer_is_fine_where_the_models_own_end_counts(plan):
    assert values(measure(plan(model="short", ignore_eos=False), ""))["errors"] == 0


def test_a_slow_server_is_seen_as_slow(plan):
    assert values(measure(plan(model="slow", requests=2), ""))["first token, p50"] >= 200


def test_an_open_loop_sends_on_time_and_says_how_late_it_was(plan, server):
    report = measure(plan(rate=40.0, requests=None, duration_s=0.5, model="slow"), "")
    found = values(report)
    assert found["whole answers"] == len(server.bodies) > 5
    assert found["load generator late, p99"] < 100
    # Later ones did not wait for earlier ones, each of which took 200 ms.
    assert len(server.connections) > 4


def test_an_open_loop_is_bounded_by_requests_or_by_time(plan, server):
    assert values(measure(plan(rate=200.0, requests=5, duration_s=None), ""))["whole answers"] == 5
    measure(plan(rate=100.0, requests=1000, duration_s=0.2), "")
    assert 5 < len(server.bodies) < 60


def test_what_an_open_loop_could_not_send_is_an_error(plan):
    found = values(measure(plan(rate=100.0, requests=10, duration_s=5.0, model="slow", max_in_flight=1), ""))
    assert found["errors: not sent"] > 0
    assert found["errors: not sent"] + found["whole answers"] == 10


def test_several_urls_share_the_requests(plan, server):
    measure(plan(urls=[server.url, f"{server.url}/v1"]), "")
    assert len(server.bodies) == 6


def test_a_trace_is_replayed_with_its_lengths_and_times(plan, server, tmp_path):
    trace = tmp_path / "tiny.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,3,2\r\n2023-11-16 18:17:05.9799600,9,4"
    )
    report = measure(plan(trace=trace, speedup=10.0, requests=None, input_cap=5), "")
    found = values(report)
    assert (found["requests of the trace"], found["whole answers"]) == (2, 2)
    assert found["of them, prompts cut by --input-cap"] == 1
    assert [len(body["messages"][0]["content"].split()) for body in server.bodies] == [3, 5]
    assert [body["max_tokens"] for body in server.bodies] == [2, 4]
    assert found["requests"] < 10  # the second came 0.2 s after the first


def test_a_server_that_answers_nothing_cannot_be_measured(plan):
    with pytest.raises(CannotMeasure, match="http 503"):
        measure(plan(model="busy", warmup=1), "")


def test_of_several_models_one_must_be_named(plan, server):
    server.listed = ["good", "slow"]
    with pytest.raises(CannotMeasure, match="--model"):
        measure(plan(model=None), "")


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mesh.cli.main", "bench", "load", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_writes_the_one_shape_and_exits_0(server, tmp_path):
    file = tmp_path / "report.json"
    ran = bench(server.url, "--requests", "4", "--output-tokens", "3", "--json", str(file), "--markdown")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(file.read_text())
    assert {"bench", "date", "machine", "command", "rows"} <= report.keys()
    shape = {"metric", "value", "unit", "peer", "peer_value", "ratio", "goal", "met"}
    assert all(row.keys() - {"note"} == shape for row in report["rows"])
    assert "| whole answers | 4 | requests |" in ran.stdout
    assert report["command"].startswith("shoal bench load http")


def test_a_missed_goal_is_exit_code_1(server):
    ran = bench(server.url, "--model", "short", "--requests", "2", "--warmup", "0")
    assert ran.returncode == 1
    assert "short answer" in ran.stdout


def test_nobody_there_is_exit_code_2_with_the_reason():
    ran = bench("http://127.0.0.1:9", "--requests", "2")
    assert ran.returncode == 2
    assert "does not answer as an OpenAI server" in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_load_at_once_and_says_so(server, number):
    command = [sys.executable, "-m", "mesh.cli.main", "bench", "load", server.url, "--model", "hangs"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 30
        while not server.bodies and time.monotonic() < deadline:
            time.sleep(0.02)
        began = bool(server.bodies)
        running.send_signal(number)
        _, said = running.communicate(timeout=20)
    assert began, "no request came before the signal"
    assert running.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("reply", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}"])
def test_a_server_that_does_not_speak_http_is_told_as_such(reply):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CannotMeasure, match="does not answer as an OpenAI server"):
            models_at(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("listed", ["abc", 5, ["a"]])
def test_a_list_of_models_of_another_shape_is_told_as_such(server, listed, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler._whole(200, {"data": listed}))
    with pytest.raises(CannotMeasure, match="does not answer as an OpenAI server"):
        models_at(server.url)


def test_a_report_that_cannot_be_written_is_refused_before_the_load(server, tmp_path):
    ended = bench(server.url, "--requests", "2", "--json", str(tmp_path / "none" / "report.json"))
    assert ended.returncode == 2
    assert "cannot write" in ended.stderr
    assert server.bodies == []
