"""Whole blocks in and out of the pool: what one engine computed serves another, and nothing that runs is hurt."""

import socket
import threading

import pytest
import torch

from gpu_worker.engine.api import AcceptedEvent, ChoicePlan, FinishedEvent, TokensEvent
from gpu_worker.engine.bulk import HEADER, BulkPort, Kind
from gpu_worker.engine.frames import FramePort
from gpu_worker.engine.holdings import DEVICE_TIER, SHARED_TIER
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.messages import Shutdown, StepDone, Submit, decode_report, encode
from gpu_worker.engine.process import _Port, serve
from gpu_worker.engine.transfer import Transfer
from gpu_worker.models.paged import KvShape, PagedKv
from shoal.types.v1 import types_pb2

PROMPT = [5 + at % 60 for at in range(70)]  # four full blocks and six tokens


def computed(engine, lab, plan) -> dict[bytes, bytes]:
    """The blocks of a plan that the engine runs to its end."""
    engine.submit(plan)
    answers = lab.finish(engine)
    keys = [key for step in answers.steps for found in step.blocks_computed.values() for key in found]
    return {key: bytes(engine.transfer.dump(key)) for key in keys}


def accepted(answers) -> AcceptedEvent:
    return next(event for event in answers.events if isinstance(event, AcceptedEvent))


def test_tiers_are_numbered_as_in_the_contract():
    """The engine does not read the contract, so nothing else holds it to these numbers."""
    assert (DEVICE_TIER, SHARED_TIER) == (types_pb2.KV_TIER_DEVICE, types_pb2.KV_TIER_SHARED)


def test_an_answer_from_loaded_blocks_is_the_computed_one_and_says_where_they_came_from(lab):
    plan = lab.plan("r", PROMPT, max_tokens=20)
    first, second = lab.engine(), lab.engine()
    blocks = computed(first, lab, plan)
    alone = lab.answer(lab.engine(), plan)
    keys = list(blocks)[:4]
    assert all(second.transfer.load(key, blocks[key]) for key in keys)
    assert (second.pool.cached, second.pool.used) == (4, 0)
    second.submit(lab.plan("r", PROMPT, max_tokens=20, fetched=(1, 4)))
    answers = lab.finish(second)
    assert answers.ids["r", 0] == alone
    assert accepted(answers).cached == {1: 16, 4: 48}
    assert answers.ends["r", 0].usage.cached == {1: 16, 4: 48}
    assert sum(step.prompt_tokens for step in answers.steps) == len(PROMPT) - 64


def test_loaded_blocks_are_reported_as_stored_and_not_as_computed(lab):
    engine, source = lab.engine(), lab.engine()
    key, payload = next(iter(computed(source, lab, lab.plan("r", PROMPT)).items()))
    engine.transfer.load(key, payload)
    result = engine.step()
    assert result.blocks_stored == [key]
    assert result.blocks_computed == {}


def test_blocks_that_were_evicted_before_the_request_started_count_nowhere(lab):
    engine = lab.engine()
    engine.submit(lab.plan("r", PROMPT, fetched=(0, 4)))
    assert accepted(lab.finish(engine)).cached == {}


def test_only_what_the_device_has_of_the_fetched_range_counts_for_it(lab):
    source, engine = lab.engine(), lab.engine()
    blocks = computed(source, lab, lab.plan("r", PROMPT))
    for key in list(blocks)[:2]:
        engine.transfer.load(key, blocks[key])
    engine.submit(lab.plan("r", PROMPT, fetched=(0, 4)))
    assert accepted(lab.finish(engine)).cached == {4: 32}


def test_output_blocks_of_a_moved_answer_count_as_no_prompt(lab):
    source, engine = lab.engine(), lab.engine()
    prompt = PROMPT[:32]
    whole = lab.answer(source, lab.plan("w", prompt, max_tokens=40))
    blocks = {key: bytes(source.transfer.dump(key)) for key in source.block_keys()}
    for key, payload in blocks.items():
        engine.transfer.load(key, payload)
    moved = lab.plan("w", prompt, max_tokens=40, choices=[ChoicePlan(0, whole[:33])], fetched=(0, 4), attempt=2)
    engine.submit(moved)
    answers = lab.finish(engine)
    assert whole[:33] + answers.ids["w", 0] == whole
    assert accepted(answers).cached == {4: 32}


def test_a_block_is_refused_when_its_size_is_wrong_or_its_key_is_here(lab):
    engine = lab.engine()
    key, payload = next(iter(computed(engine, lab, lab.plan("r", PROMPT)).items()))
    assert not engine.transfer.load(key, payload)
    assert not engine.transfer.load(b"k" * 16, payload[:-1])
    assert not engine.transfer.load(b"k" * 16, b"")
    engine.pool.check()


def test_loading_evicts_cached_blocks_and_never_one_that_is_used(lab):
    engine, source = lab.engine(blocks=6), lab.engine()
    plan = lab.plan("runs", [9] * 40, max_tokens=40)
    alone = lab.answer(lab.engine(), plan)
    engine.submit(plan)
    answers = lab.answers()
    lab.step(engine, answers)
    used = engine.pool.used
    payload = next(iter(computed(source, lab, lab.plan("r", PROMPT)).values()))
    taken = [engine.transfer.load(bytes([at]) * 16, payload) for at in range(12)]
    assert all(taken)  # the later ones in the place of the earlier ones
    assert engine.pool.used == used
    assert engine.pool.cached == 6 - used
    engine.pool.check()
    lab.finish(engine, answers)
    assert answers.ids["runs", 0] == alone


def test_nothing_is_loaded_while_every_block_is_used():
    pool = BlockPool(2)
    held = [pool.allocate(), pool.allocate()]
    kv = PagedKv(KvShape(1, 1, 4, 1), 2, torch.device("cpu"), torch.float32)
    transfer = Transfer(pool, kv)
    assert not transfer.load(b"k" * 16, bytes(kv.block_bytes))
    pool.release(held)
    assert transfer.load(b"k" * 16, bytes(kv.block_bytes))
    pool.check()


def test_blocks_that_are_touched_stay_for_what_continues_them():
    pool = BlockPool(4)
    kv = PagedKv(KvShape(1, 1, 4, 1), 4, torch.device("cpu"), torch.float32)
    transfer = Transfer(pool, kv)
    old, others = [b"a" * 16, b"b" * 16], [b"c" * 16, b"d" * 16]
    for key in old + others:
        transfer.load(key, bytes(kv.block_bytes))
    transfer.touch([*old, b"unknown" + bytes(9)])
    transfer.load(b"e" * 16, bytes(kv.block_bytes))
    transfer.load(b"f" * 16, bytes(kv.block_bytes))
    assert pool.match(old) == 2
    assert not any(key in pool for key in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_comes_out_as_it_went_in(dtype):
    kv = PagedKv(KvShape(3, 2, 4, 1), 5, torch.device("cpu"), dtype)
    payload = bytes(at % 251 for at in range(kv.block_bytes))
    kv.write_block(2, payload)
    kv.write_block(3, bytes(kv.block_bytes))
    assert bytes(kv.read_block(2)) == payload


def test_an_engine_without_content_takes_and_gives_no_block():
    transfer = Transfer(BlockPool(2), None)
    assert not transfer.load(b"k" * 16, b"")
    assert transfer.dump(b"k" * 16) is None


def _read_to_the_end(commands, reports):
    """An engine whose reports nobody reads waits."""
    while not (reports and any(isinstance(event, FinishedEvent) for event in reports[-1].result.events)):
        report = decode_report(commands.receive())
        assert isinstance(report, StepDone)
        reports.append(report)


def test_blocks_move_between_steps_and_a_running_answer_keeps_its_tokens(lab):
    """The engine's loop with both of its connections: 60 blocks arrive while a request decodes."""
    engine, source = lab.engine(blocks=120), lab.engine()
    payload = next(iter(computed(source, lab, lab.plan("r", PROMPT)).values()))
    plan = lab.plan("runs", PROMPT, max_tokens=120)
    alone = lab.answer(lab.engine(), plan)
    ours, theirs = socket.socketpair()
    our_blocks, their_blocks = socket.socketpair()
    loop = threading.Thread(target=serve, args=(engine, _Port(theirs, their_blocks)), daemon=True)
    loop.start()
    commands = FramePort(ours)
    commands.send(encode(Submit(plan)))
    reports: list[StepDone] = []
    reading = threading.Thread(target=_read_to_the_end, args=(commands, reports), daemon=True)
    reading.start()
    port, taken = BulkPort(our_blocks), 0
    for at in range(60):
        port.send(Kind.LOAD, bytes([at]) * 16, payload)
        answer = port.receive()
        assert (answer.kind, answer.key) == (Kind.LOADED, bytes([at]) * 16)
        taken += len(answer.payload)
    port.send(Kind.DUMP, bytes([7]) * 16)
    assert bytes(port.receive().payload) == payload
    port.send(Kind.DUMP, b"?" * 16)
    assert not port.receive().payload
    reading.join(30)
    events = [event for report in reports for event in report.result.events]
    ids = [token for event in events if isinstance(event, TokensEvent) for token in event.ids]
    commands.send(encode(Shutdown()))
    loop.join(10)
    assert taken == 60
    assert ids == alone
    for end in (ours, theirs, our_blocks, their_blocks):
        end.close()


def test_the_engine_leaves_when_the_worker_is_gone_in_the_middle_of_a_block(lab):
    our_blocks, their_blocks = socket.socketpair()
    ours, theirs = socket.socketpair()
    our_blocks.sendall(HEADER.pack(Kind.LOAD, bytes(16), 1000) + b"part")
    our_blocks.close()
    with pytest.raises(EOFError):
        serve(lab.engine(), _Port(theirs, their_blocks))
    for end in (ours, theirs, their_blocks):
        end.close()
