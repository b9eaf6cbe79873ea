"""`shoal bench engine`: what its sections make of their measurements, and what becomes of one that has none."""

import random
from xml.etree import ElementTree

import pytest

from gpu_worker.engine.sequence import blocks_for
from gpu_worker.engine.static_policy import BATCH
from mesh.bench import measurer, tuning
from mesh.bench.answer import Outcome
from mesh.bench.contender import Batch
from mesh.bench.engine import curves, interference, perplexity, precision, run, start, static, static_rows
from mesh.bench.engine.chart import Chart, Line, svg
from mesh.bench.engine.plan import SECTIONS, Curves, EnginePlan, Found, Static
from mesh.bench.engine.static_rows import CONTINUOUS, MIXED, OPEN, SHARED, STATIC, Batches, Pool, Served
from mesh.bench.engine.streams import Stream, within
from mesh.bench.report import CannotMeasure, Goal, Row
from mesh.bench.tuning import Tuning
from mesh.cli.bench import ENGINE_PARTS

PLAN = EnginePlan(model="m")
SVG = "{http://www.w3.org/2000/svg}"


def by_metric(rows) -> dict[str, Row]:
    return {row.metric: row for row in rows}


# interference


def a_round(undisturbed_s: float, disturbed_s: float, alone_s: float = 2.0, beside_s: float = 4.0, gaps: int = 1000):
    return interference.Round(alone_s, beside_s, [undisturbed_s] * gaps, [disturbed_s] * gaps)


@pytest.mark.parametrize(("disturbed_s", "met"), [(0.02, True), (0.021, False)])
def test_gaps_and_first_tokens_are_compared_round_by_round(disturbed_s, met):
    rounds = [a_round(0.01, disturbed_s), a_round(0.02, 2 * disturbed_s), a_round(0.01, disturbed_s)]
    gap, first = interference.rows(PLAN, "latency", rounds)
    assert (gap.peer_value, gap.ratio, gap.met) == (pytest.approx(10), pytest.approx(100 * disturbed_s), met)
    assert (first.value, first.peer_value, first.ratio, first.met) == (4000, 2000, 2.0, True)


def test_each_preset_has_its_own_goals():
    rounds = [a_round(0.01, 0.035, alone_s=2.0, beside_s=3.2)]
    assert [row.met for row in interference.rows(PLAN, "latency", rounds)] == [False, True]
    assert [row.met for row in interference.rows(PLAN, "throughput", rounds)] == [True, False]


def test_too_few_gaps_for_a_99th_percentile_are_told():
    gap, _ = interference.rows(PLAN, "latency", [a_round(0.01, 0.01), a_round(0.01, 0.01, gaps=400)])
    assert gap.note == "at least 400 gaps a round on either side: too few for a 99th percentile"


def test_a_round_without_a_token_cannot_be_measured():
    with pytest.raises(CannotMeasure, match="no token"):
        list(interference.rows(PLAN, "latency", [a_round(0.01, 0.01, gaps=0)]))


def test_a_gap_counts_as_disturbed_if_any_part_of_it_is_and_as_undisturbed_if_all_of_it_is():
    stream = Stream(Outcome.now(), [(1.0, 0.5), (2.0, 1.0), (5.0, 3.0), (6.0, 1.0), (7.0, 1.0)])
    assert interference._meanwhile(stream, 4.0, 5.5) == [3.0, 1.0]
    assert within(stream.gaps, 0.5, 4.0) == [0.5, 1.0]


# static


POOL = Pool(blocks=364, block_bytes=1 << 19, aside=640)


def served(tokens_per_s: float, latency_s: float, blocks: float, texts: list[str] | None = None) -> Served:
    return Served(
        tokens_per_s, tokens_per_s / 100, [latency_s / 2, latency_s / 2, latency_s], blocks, texts or ["a", "b"]
    )


def batches_of(open_s: float) -> Batches:
    """Continuous batching's latency in the open loop is `open_s`, where static batching's is 10 s."""
    return {
        (MIXED, CONTINUOUS): [served(230, 80, 60), served(460, 40, 60)],
        (MIXED, STATIC): [served(100, 100, 100), served(200, 50, 100)],
        (SHARED, CONTINUOUS): [served(300, 30, 60), served(300, 30, 60, ["a", "c"])],
        (SHARED, STATIC): [served(100, 90, 100), served(100, 90, 100)],
        (OPEN, CONTINUOUS): [served(100, open_s, 60)],
        (OPEN, STATIC): [served(100, 10, 100)],
    }


def test_continuous_batching_is_compared_with_static_in_each_round():
    rows = by_metric(static_rows.rows(Static(), batches_of(3.3), POOL))
    assert [(row.ratio, row.met) for row in rows.values() if row.peer] == [
        (pytest.approx(2.3), True), (pytest.approx(0.8), None), (pytest.approx(0.6), True),
        (pytest.approx(3.0), False), (pytest.approx(1 / 3), None), (pytest.approx(0.6), None),
        (pytest.approx(0.33), True), (pytest.approx(0.33), None),
    ]  # fmt: skip
    assert rows["answers that differ, mixed prompts"].met is True
    assert rows["answers that differ, a shared system prompt"].value == 1
    assert rows["answers that differ, at 80 % of static's capacity"].met is True


def test_the_slowest_answers_under_a_load_that_static_batching_bears_have_the_goal():
    rows = by_metric(static_rows.rows(Static(), batches_of(3.4), POOL))
    p99, p50 = (rows[f"{what} latency at 80 % of static's capacity"] for what in ("p99", "p50"))
    assert (p99.value, p99.peer_value, p99.met) == (3.4, 10, False)
    assert (p50.value, p50.peer_value, p50.goal) == (1.7, 5, None)


def test_figures_measured_under_the_cap_tell_it_in_blocks_and_bytes():
    rows = static_rows.rows(Static(), batches_of(1), POOL)
    told = [row for row in rows if row.goal and row.peer]
    assert len(told) == 4
    assert all("364 blocks (182 MiB)" in row.note and "sets 640 aside" in row.note for row in told)


def test_continuous_batching_gets_less_kv_than_a_static_batch_sets_aside():
    pool = static.pool_of(Static(static_kv_bytes=1 << 30), static_blocks=2048)
    assert (pool.aside, pool.block_bytes) == (BATCH * blocks_for(1024 + 256), 1 << 19)
    assert pool.blocks == 364 <= 0.57 * pool.aside
    assert pool.total_bytes == 364 << 19


def test_open_arrivals_are_as_frequent_as_a_share_of_what_static_batching_served():
    rate = static_rows.open_rate(Static(), batches_of(1))
    assert rate == pytest.approx(0.8 * 1.5)
    asks, again = (static.arriving(Static(open_requests=1000), rate, random.Random(1)) for _ in range(2))
    assert asks == again
    assert 1000 / asks[-1].at_s == pytest.approx(rate, rel=0.1)
    assert {len(ask.prompt.split()) for ask in asks} == {64, 512, 1024}


def test_a_batch_has_the_lengths_that_are_asked_for_and_a_shared_head_of_its_own():
    shape, rng = Static(), random.Random(1)
    mixed, first, second = (static.asks_of(shape, rng, shared=shared) for shared in (False, True, True))
    assert {len(ask.prompt.split()) for ask in mixed} == {64, 512, 1024}
    assert all(16 <= ask.output_tokens <= 256 for ask in mixed)
    heads = [{tuple(ask.prompt.split()[:512]) for ask in asks} for asks in (first, second)]
    assert [len(head) for head in heads] == [1, 1]
    assert heads[0] != heads[1]
    assert len({ask.prompt for ask in first}) == shape.requests


# perplexity


def test_int8_and_int4_may_be_so_much_more_perplexing_than_bf16():
    rows = by_metric(perplexity.rows({"fp32": 10.0, "bf16": 10.0, "int8": 10.14, "int4": 10.4}, {}))
    assert rows["perplexity above bf16, int8"].met is True
    assert rows["perplexity above bf16, int4"].met is False
    assert rows["perplexity above fp32, int4"].value == pytest.approx(0.4)


def test_a_precision_that_is_not_there_leaves_its_goal_unmeasured():
    rows = by_metric(perplexity.rows({"bf16": 10.0, "int4": 10.0}, {"int8": "no such kernel"}))
    row = rows["perplexity above bf16, int8"]
    assert (row.value, row.met, row.note) == (None, None, "no such kernel")
    assert rows["perplexity above bf16, int4"].met is True


def test_the_text_is_cut_into_full_windows(smollm2):
    plan = EnginePlan(model=str(smollm2.path), text_tokens=2000, window_tokens=512)
    windows, digest = perplexity._windows(plan)
    assert [len(window) for window in windows] == [512] * 3
    assert len(digest) == 64
    whole, _ = perplexity._windows(EnginePlan(model=str(smollm2.path)))
    assert sum(map(len, whole)) > 19_000


# start


def test_a_start_is_measured_against_reading_the_file():
    quick, slow = (start.rows([start.Start(2.0, seconds)] * 3, 100) for seconds in (8.0, 8.1))
    assert [row.met for row in quick if row.goal] == [True]
    assert [row.met for row in slow if row.goal] == [False]


# curves


FLOOR = curves.Floor(50.0, 500.0, 100e6, 200e6, 20_000.0, "int8")


def test_a_step_cannot_be_quicker_than_memory_nor_than_the_int8_units():
    assert FLOOR.ms(1, 0) == pytest.approx(2.0)  # 100 MB at 50 GB/s
    assert FLOOR.ms(64, 0) == pytest.approx(25.6)  # 64 x 200 MOP at 500 GOP/s
    assert FLOOR.ms(1, 5000) == pytest.approx(4.0)  # as much KV as weights


def test_each_shape_is_a_row_beside_its_limit_and_one_that_does_not_fit_says_so():
    shape = Curves(batches=(1, 2), batch_context=256, contexts=(256, 8192), context_batches=(1,))
    times = {(1, 256): 5.0, (2, 256): 6.0, (1, 8192): None}
    rows = by_metric(curves.rows(shape, times, FLOOR))
    assert len(rows) == 5
    assert rows["decode step at 256 tokens, 2 sequences"].value == 6.0
    assert rows["decode step at 256 tokens, 2 sequences"].peer_value == FLOOR.ms(2, 256)
    missing = rows["decode step at 8,192 tokens, 1 sequence"]
    assert (missing.value, missing.note) == (None, "its KV does not fit the pool")


def test_the_drawing_holds_every_measured_point_and_the_limits_dashed():
    shape = Curves(batches=(1, 8, 64), contexts=(128, 8192), context_batches=(1, 8))
    times = {one: FLOOR.ms(*one) + 3 for one in curves.shapes_of(shape)} | {(8, 8192): None}
    drawn = ElementTree.fromstring(curves.drawing(shape, times, FLOOR))
    circles, lines = drawn.iter(f"{SVG}circle"), [*drawn.iter(f"{SVG}polyline")]
    assert len([*circles]) == 3 + 2 + 1
    assert sum("stroke-dasharray" in line.attrib for line in lines) == 2 + 2


def test_a_straight_line_of_powers_is_drawn_straight_inside_the_chart():
    chart = Chart("a < b", "x", "y", [Line("l", [(1.0, 3.0), (10.0, 30.0), (100.0, 300.0)])])
    drawn = ElementTree.fromstring(svg([chart], "note"))
    (line,) = drawn.iter(f"{SVG}polyline")
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert (x1 - x0, y1 - y0) == (pytest.approx(x2 - x1, abs=0.2), pytest.approx(y2 - y1, abs=0.2))
    assert 0 < x0 < x2 < 460
    assert 0 < y2 < y0 < 300


# precision


def test_each_precision_stands_beside_the_first():
    def batches(tokens_per_s: float) -> dict[int, list[Batch]]:
        return {8: [Batch(100, 100 / tokens_per_s, [0.5])]}

    rows = [*precision.rows({"fp32": batches(100), "int8": batches(300)}, {"int4": "no such kernel"})]
    figures = [(row.metric, row.value, row.ratio) for row in rows]
    assert figures[:2] == [
        ("output of 8 streams, fp32", pytest.approx(100), None),
        ("output of 8 streams, int8", pytest.approx(300), pytest.approx(3.0)),
    ]
    assert rows[-1].note == "no such kernel"


# the whole


def test_a_section_that_cannot_be_measured_is_a_row_and_the_others_go_on(monkeypatch):
    def broken(plan: EnginePlan) -> Found:
        raise CannotMeasure("the mesh did not start")

    def good(plan: EnginePlan) -> Found:
        return Found([Row(metric="m", value=1, goal=Goal(">=", 1))], {"a": 1})

    monkeypatch.setattr(run, "SECTIONS", {"static": broken, "start": good})
    report = run.measure(EnginePlan(model="m", only=("static", "start")), "shoal bench engine")
    assert [(row.metric, row.note) for row in report.rows] == [
        ("not measured: static", "the mesh did not start"), ("m", ""),
    ]  # fmt: skip
    assert (report.exit_code, report.ran_on["a"]) == (2, 1)
    with pytest.raises(CannotMeasure, match="did not start"):
        run.measure(EnginePlan(model="m", only=("static",)), "shoal bench engine")


def test_every_section_has_its_measurement_and_its_name_on_the_command_line():
    assert list(run.SECTIONS) == list(SECTIONS) == ENGINE_PARTS.split(",")


# what a worker makes of its settings


def test_a_worker_tells_the_settings_that_it_would_have():
    settings = tuning.effective("m", Tuning(precision="bf16").env(max_sequences=7))
    assert (settings["precision"], settings["max_sequences"]) == ("bf16", 7)
    assert tuning.facts(settings)["max_sequences"] == 7


def test_a_setting_that_the_worker_lacks_or_does_not_take_is_no_measurement():
    with pytest.raises(CannotMeasure, match="no setting SHOAL_WORKER_SPELL"):
        tuning.effective("m", Tuning().env(spell="x"))
    with pytest.raises(CannotMeasure, match="SHOAL_WORKER_PRECISION"):
        tuning.effective("m", Tuning(precision="fp7").env())


def test_a_measurement_without_a_model_says_what_to_do(tmp_path):
    with pytest.raises(CannotMeasure, match="shoal pull nothing"):
        measurer.run("start", {"SHOAL_MODEL": "nothing", "SHOAL_HOME": str(tmp_path)})
