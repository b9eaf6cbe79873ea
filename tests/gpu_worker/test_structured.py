"""Structured answers through a worker: its engine, the compiler's process, and refusals that come later."""

import asyncio
import json
import re
from typing import Any

import grpc
import pytest

from mesh.errors import error_of
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")
TIMEOUT_S = 60
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer"},
          "alive": {"type": "boolean"}}, "required": ["kind", "alive"]}  # fmt: skip


def sampling(**fields: Any) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**({"temperature": 1, "seed": 5, "max_tokens": 200} | fields))


async def told(call: Any) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Ids and finish reasons by choice."""
    ids: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    async for response in call:
        if response.HasField("tokens"):
            ids.setdefault(response.tokens.choice, []).extend(response.tokens.ids)
        if response.HasField("finished"):
            ends[response.finished.choice] = response.finished.reason
    return ids, ends


def text_of(ids: list[int]) -> str:
    return "".join(chr(31 + index) for index in ids)


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await told(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error_of(caught.value)


async def test_answers_of_every_kind_of_structure_are_what_was_asked_for(rig: Any) -> None:
    choices = [worker_pb2.Choice(index=index) for index in range(2)]
    wanted = sampling(json_schema=json.dumps(SCHEMA), logit_bias={3: -100, 10: -100, 11: -100, 14: -100})
    ids, ends = await told(rig.stub.Generate(rig.request(sampling=wanted, choices=choices), timeout=TIMEOUT_S))
    for index in (0, 1):
        if ends[index] == types_pb2.FINISH_REASON_STOP:
            said = json.loads(text_of(ids[index]))
            assert said["kind"] in ("cat", "dog")
            assert isinstance(said["alive"], bool)
    regex = rig.request(sampling=sampling(regex="[a-f]{3}-[0-9]{2}"))
    ids, ends = await told(rig.stub.Generate(regex, timeout=TIMEOUT_S))
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text_of(ids[0]))
    assert ends == {0: types_pb2.FINISH_REASON_STOP}
    ids, ends = await told(
        rig.stub.Generate(rig.request(sampling=sampling(grammar='root ::= "yes" | "no"')), timeout=TIMEOUT_S)
    )
    assert text_of(ids[0]) in ("yes", "no")


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ("regex", "(a"),
        ("grammar", "root ::= nowhere"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", "false"),
        ("json_schema", json.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(2200)}})),
    ],
)
async def test_a_structure_that_cannot_be_compiled_fails_alone_and_names_its_field(
    rig: Any, eventually: Any, structure: str, text: str
) -> None:
    neighbour = asyncio.ensure_future(told(rig.stub.Generate(rig.request(), timeout=TIMEOUT_S)))
    error = await refused(rig.stub.Generate(rig.request(sampling=sampling(**{structure: text})), timeout=TIMEOUT_S))
    assert error.field == structure
    assert len((await neighbour)[0][0]) == 16
    assert await rig.is_serving()
    await eventually(lambda: rig.idle)


async def test_a_worker_is_well_and_answers_others_while_a_grammar_compiles(rig: Any, eventually: Any) -> None:
    endless = json.dumps({"properties": {f"q{n}": {"type": "string"} for n in range(2200)}})
    slow = rig.stub.Generate(rig.request(sampling=sampling(json_schema=endless)), timeout=TIMEOUT_S)
    await eventually(lambda: rig.bridge.load.running)
    for _ in range(3):
        assert len((await told(rig.stub.Generate(rig.request(), timeout=5)))[0][0]) == 16
        assert rig.bridge.well()
    assert (await refused(slow)).field == "json_schema"


async def test_a_client_that_leaves_while_its_grammar_compiles_leaves_nothing(rig: Any, eventually: Any) -> None:
    endless = json.dumps({"properties": {f"r{n}": {"type": "string"} for n in range(2200)}})
    call = rig.stub.Generate(rig.request(sampling=sampling(json_schema=endless)), timeout=TIMEOUT_S)
    await eventually(lambda: rig.bridge.load.running)
    call.cancel()
    await eventually(lambda: rig.idle)


async def test_what_breaks_in_a_step_ends_that_request_and_its_neighbours_go_on(rig: Any) -> None:
    neighbour = asyncio.ensure_future(told(rig.stub.Generate(rig.request(), timeout=TIMEOUT_S)))
    never_said = [worker_pb2.Choice(index=0, emitted_ids=[70, 71])]
    broken = rig.request(sampling=sampling(regex="[0-9]+"), choices=never_said)
    _, ends = await told(rig.stub.Generate(broken, timeout=TIMEOUT_S))
    assert ends == {0: types_pb2.FINISH_REASON_ERROR}
    assert len((await neighbour)[0][0]) == 16
