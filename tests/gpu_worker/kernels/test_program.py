"""The CPU kernels beside torch: each operation in every format, and rows that depend on nothing but themselves."""

import os

import numpy as np
import pytest
import torch

from gpu_worker.kernels.program import AttentionRows, Format, Kv, Packed, Part, Program, Weights, step_of
from gpu_worker.models.rope import angles, inverse_frequencies, rotate

# How far a result may be from fp32's, as a share of the results' own size: rounding of inputs and weights.
TOLERANCE = {Format.FP32: 2e-6, Format.BF16: 4e-3, Format.INT8: 1e-2, Format.INT4: 1.1e-1}


def rows_of(program, x: torch.Tensor):
    """Rows that embedding puts there: token i is row i."""
    rows = program.rows(x.shape[1])
    program.embed(x, rows)
    return rows


def tokens(count: int, first: int = 0):
    """One piece of `count` tokens, whose embedding rows are theirs."""
    return step_of([(0, list(range(first, first + count)), list(range(-(-count // 16))), True)])


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (33, 24), (7, 100), (192, 576)])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_linear_layer_equals_torch_as_far_as_its_format_allows(form, outputs, inputs, count):
    torch.manual_seed(outputs)
    x, weight, bias = torch.randn(count, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    program = Program(threads=2, max_rows=count, max_logits=1)
    packed, out = Packed(form, count, inputs), program.rows(outputs)
    program.pack(Part.OTHER, rows_of(program, x), packed)
    program.linear(Part.ATTENTION, packed, Weights(weight, bias, form), out)
    program.run(tokens(count))
    wanted = torch.nn.functional.linear(x, weight, bias)
    error = (torch.from_numpy(out.numpy().copy()) - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[form]


@pytest.mark.parametrize("form", Format)
def test_a_row_of_a_linear_layer_is_the_same_bits_whatever_shares_the_step(form):
    torch.manual_seed(3)
    x, weight = torch.randn(50, 200), torch.randn(70, 200)
    program = Program(threads=2, max_rows=50, max_logits=1)
    packed, out, layer = Packed(form, 50, 200), program.rows(70), Weights(weight, None, form)
    program.pack(Part.OTHER, rows_of(program, x), packed)
    program.linear(Part.ATTENTION, packed, layer, out)
    program.run(tokens(50))
    together = out.numpy().copy()
    for first, count in ((0, 1), (49, 1), (3, 7), (11, 25)):
        program.run(tokens(count, first))
        assert np.array_equal(out.numpy()[:count], together[first : first + count])


def test_int4_gives_back_weights_that_were_of_four_bits():
    """As in GGUF's Q4_1: groups of 32, step x nibble + least, both fp16; so such a file loses nothing."""
    torch.manual_seed(4)
    step, least = torch.rand(40, 2, 1).half().float() / 16, -torch.rand(40, 2, 1).half().float()
    nibbles = torch.randint(0, 16, (40, 2, 32)).float()
    nibbles[:, :, 0], nibbles[:, :, 1] = 0, 15
    weight = (step * nibbles + least).reshape(40, 64)
    program = Program(threads=1, max_rows=64, max_logits=1)
    packed, out = Packed(Format.INT4, 64, 64), program.rows(40)
    program.pack(Part.OTHER, rows_of(program, torch.eye(64)), packed)
    program.linear(Part.ATTENTION, packed, Weights(weight, None, Format.INT4), out)
    program.run(tokens(64))
    torch.testing.assert_close(torch.from_numpy(out.numpy().copy()).T, weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", Format)
def test_gated_layers_and_added_results_equal_torch(form):
    torch.manual_seed(1)
    hidden, wide, count = 48, 80, 13
    x, gate, up, down = (
        torch.randn(*size) for size in ((count, hidden), (wide, hidden), (wide, hidden), (hidden, wide))
    )
    program = Program(threads=1, max_rows=count, max_logits=1)
    rows, gated = rows_of(program, x), program.rows(wide)
    packed = Packed(form, count, wide)
    program.pack(Part.OTHER, rows, packed)
    program.swiglu(packed, Weights(gate, None, form, gated=(up, None)), gated)
    program.pack(Part.OTHER, gated, packed)
    program.linear(Part.FEED_FORWARD, packed, Weights(down, None, form), rows, add=True)
    program.run(tokens(count))
    wanted = x + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    error = (torch.from_numpy(rows.numpy().copy()) - wanted).norm() / wanted.norm()
    assert error < 2 * TOLERANCE[form]


def test_the_norm_before_the_head_is_of_the_rows_that_need_logits():
    torch.manual_seed(2)
    x, weight, head = torch.randn(9, 40), torch.rand(40), torch.eye(40)
    program = Program(threads=1, max_rows=9, max_logits=2)
    packed, out = Packed(Format.FP32, 2, 40), program.rows(40)
    program.norm(Part.OTHER, rows_of(program, x), weight, 1e-5, packed)
    program.linear(Part.OTHER, packed, Weights(head, None, Format.FP32), out)
    step = step_of([(0, [0, 1, 2], [0], True), (0, [3, 4], [1], False), (0, [5, 6, 7, 8], [2], True)])
    assert program.run(step) == 2
    wanted = torch.nn.functional.rms_norm(x[[2, 8]], (40,), weight, 1e-5)
    torch.testing.assert_close(torch.from_numpy(out.numpy()[:2].copy()), wanted)


# Formats of KV, and how far attention may be from torch's in fp32.
KV = {Format.FP32: 2e-6, Format.BF16: 6e-3, Format.INT8: 1.2e-2}


class OneLayer:
    """Attention alone over a pool: rows of q, k and v in, attended rows out."""

    def __init__(self, x: torch.Tensor, heads: int, kv_heads: int, dim: int, form: Format, blocks: int = 64) -> None:
        self.x, self.heads, self.kv_heads, self.dim = x, heads, kv_heads, dim
        self.kv = Kv(form, blocks, 1, kv_heads, dim)
        self.frequencies = inverse_frequencies(dim, {"rope_theta": 10000.0})
        self.program = program = Program(2, max_rows=len(x), max_logits=1)
        packed, self.out = Packed(Format.FP32, len(x), heads * dim), program.rows(heads * dim)
        rows = AttentionRows(rows_of(program, x), program.rows(heads * dim), program.rows(dim), self.out, packed)
        program.attention(self.kv, 0, heads, dim**-0.5, self.frequencies, rows)

    def run(self, *pieces: tuple[int, int, list[int]]) -> torch.Tensor:
        """Compute [start, start + count) in blocks, for each piece; the attended rows."""
        step = [(start, list(range(start, start + count)), blocks, False) for start, count, blocks in pieces]
        self.program.run(step_of(step))
        return torch.from_numpy(self.out.numpy()[: sum(count for _, count, _ in pieces)].copy())

    def wanted(self) -> torch.Tensor:
        count, group = len(self.x), self.heads // self.kv_heads
        qkv = self.x.view(count, self.heads + 2 * self.kv_heads, self.dim)
        turned = rotate(qkv[:, : self.heads + self.kv_heads], *angles(torch.arange(count), self.frequencies))
        q, k = turned[:, : self.heads], turned[:, self.heads :].repeat_interleave(group, dim=1)
        v = qkv[:, self.heads + self.kv_heads :].repeat_interleave(group, dim=1)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*(one.transpose(0, 1) for one in (q, k, v)), is_causal=True).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("form", "tolerance"), KV.items())
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (2, 1, 128), (100, 1, 8), (6, 2, 34)])
@pytest.mark.parametrize("count", [1, 17, 300, 1100])
def test_attention_equals_torch(heads, kv_heads, dim, count, form, tolerance):
    if form is Format.INT8 and dim % 4:
        dim += 2
    torch.manual_seed(count)
    layer = OneLayer(torch.randn(count, (heads + 2 * kv_heads) * dim), heads, kv_heads, dim, form, blocks=70)
    got, wanted = layer.run((0, count, list(range(70)))), layer.wanted()
    assert (got - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize("form", KV)
def test_attention_is_the_same_bits_however_a_sequence_is_cut(form):
    """Whole, in pieces that split blocks and segments, and token by token; a long context is spread over threads."""
    torch.manual_seed(5)
    x = torch.randn(1100, 5 * 64)
    whole = OneLayer(x, 3, 1, 64, form, blocks=69).run((0, 1100, list(range(69))))
    layer = OneLayer(x, 3, 1, 64, form, blocks=140)
    blocks = list(range(70, 139))
    cut, start = [], 0
    for count in (1, 1, 15, 100, 12, 1, 127, 74, 1, 180, 1, 1, 510, 1, 75):
        cut.append(layer.run((start, count, blocks)))
        start += count
    assert start == 1100
    assert torch.equal(torch.cat(cut), whole)


@pytest.mark.parametrize("form", [Format.BF16, Format.INT8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 32), (8, 8, 32), (4, 1, 32), (6, 3, 128), (100, 1, 8)])
def test_a_crowd_of_decodes_gets_the_bits_that_each_gets_alone(heads, kv_heads, dim, form):
    """With so many a task takes several KV heads of a sequence, and contexts beyond a segment are still spread."""
    torch.manual_seed(7)
    layer = OneLayer(torch.randn(1100, (heads + 2 * kv_heads) * dim), heads, kv_heads, dim, form, blocks=250)
    contexts, pieces, free = [1, 15, 16, 40, 511, 512, 513, 1090, 3, 100, 33, 300, 7], [], 0
    for context in contexts:
        blocks = list(range(free, free + context // 16 + 1))
        layer.run((0, context, blocks))
        pieces.append((context, 1, blocks))
        free += len(blocks)
    together = layer.run(*pieces)
    alone = torch.cat([layer.run(piece) for piece in pieces])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("form", KV)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "part", [slice(192), slice(192, 256), slice(256, 320), slice(300, 301)], ids=["q", "k", "v", "one"]
)
def test_what_is_no_number_shows(form, number, part):
    """In the row that has it and, as a value of fp32 or bf16, in others of its piece."""
    x = torch.randn(20, 5 * 64)
    x[19, part] = number
    got = OneLayer(x, 3, 1, 64, form).run((0, 20, [0, 1]))
    assert not torch.isfinite(got[19]).all()
    if part.stop <= 256 or form is Format.INT8:
        assert torch.isfinite(got[:19]).all()


@pytest.mark.parametrize("form", [Format.BF16, Format.INT8])
def test_what_a_block_held_before_never_shows(form):
    """A block comes back full of NaN, as one that a broken sequence left."""
    torch.manual_seed(6)
    x = torch.randn(37, 5 * 64)
    clean = OneLayer(x, 3, 1, 64, form)
    wanted = clean.run((0, 37, [0, 1, 2]))
    dirty = OneLayer(x, 3, 1, 64, form)
    for block in range(3):
        dirty.kv.write_block(block, np.full(dirty.kv.block_bytes // 2, 0x7FC0, np.uint16).tobytes())
    got = torch.cat([dirty.run((0, 20, [0, 1, 2])), *(dirty.run((i, 1, [0, 1, 2])) for i in range(20, 37))])
    assert torch.equal(got, wanted)


def test_blocks_travel_whole():
    kv = Kv(Format.BF16, 3, 2, 1, 16)
    payload = np.random.default_rng(0).integers(0, 255, kv.block_bytes, np.uint8).tobytes()
    kv.write_block(1, payload)
    kv.copy_block(1, 2)
    assert bytes(kv.read_block(2)) == payload
    assert bytes(kv.read_block(0)) == bytes(kv.block_bytes)


def test_the_likeliest_is_the_first_among_equals_and_numbers_that_are_none_are_told():
    logits = torch.zeros(4, 100)
    logits[0, [40, 97]] = 3.0
    logits[1, 99] = 1.0
    logits[2, 7] = float("nan")
    logits[3, 12] = float("inf")
    program = Program(threads=1, max_rows=4, max_logits=4)
    rows = rows_of(program, logits)
    program.choose(rows)
    program.run(step_of([(0, [i], [i], True) for i in range(4)]))
    assert program.tokens[:2].tolist() == [40, 99]
    assert program.usable.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4, Format.BF16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_stays_one_and_alone(form, value):
    """Rounding to integers must not make a number of it."""
    x = torch.ones(3, 64)
    x[1, 9] = value
    program = Program(threads=1, max_rows=3, max_logits=1)
    packed, out = Packed(form, 3, 64), program.rows(32)
    program.pack(Part.OTHER, rows_of(program, x), packed)
    program.linear(Part.ATTENTION, packed, Weights(torch.ones(32, 64), None, form), out)
    program.run(tokens(3))
    finite = np.isfinite(out.numpy()).all(axis=1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_helping_threads_keep_off_the_core_of_who_calls_them():
    allowed, before = os.sched_getaffinity(0), {int(thread) for thread in os.listdir("/proc/self/task")}
    program = Program(threads=2, max_rows=1, max_logits=1)
    (helper,) = {int(thread) for thread in os.listdir("/proc/self/task")} - before
    try:
        for core in sorted(allowed)[:2]:
            os.sched_setaffinity(0, {core})
            program.run(tokens(1))
            assert os.sched_getaffinity(helper) == allowed - {core}
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_step_that_is_too_large_is_refused():
    program = Program(threads=1, max_rows=3, max_logits=1)
    with pytest.raises(ValueError, match="4 rows"):
        program.run(tokens(4))
