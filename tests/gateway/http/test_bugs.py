"""A fault of ours is told in OpenAI's shape, in every stage of an answer; the traceback is the server's to log."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.output import Output

BODY = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}


async def _post(mesh: Any) -> Any:
    async with mesh.http() as client:
        return await client.post("/v1/chat/completions", json=BODY)


async def test_a_bug_before_the_answer_is_a_500(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: Any) -> AsyncIterator[Any]:
        raise KeyError("a bug")
        yield

    monkeypatch.setattr("gateway.relay.Relay.answer", breaks)
    reply = await _post(mesh)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"


async def test_a_bug_in_a_stream_ends_it_with_an_error_and_done(mesh, play, ids_of, monkeypatch) -> None:
    def breaks(*_: Any) -> Any:
        raise KeyError("a bug")

    mesh.worker.scripts = [play.says(ids_of("hello you there"))]
    monkeypatch.setattr(Output, "ended", breaks)
    reply = await _post(mesh)
    assert reply.status_code == 200
    assert '"server_error"' in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
