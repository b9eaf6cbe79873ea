"""Rows of the benchmarks that compare: what each side's figures become, and what happens to a peer that fails."""

from collections.abc import Sequence

import pytest

from mesh.bench import cold, first_token, gateway, peer_rows, peers
from mesh.bench.contender import Batch
from mesh.bench.report import CannotMeasure, Report
from mesh.bench.slices import GENERATOR, Slice, errors, split
from mesh.clients.usage import Usage
from shoal.types.v1 import types_pb2


def a_slice(output_tokens: int, requests: int, per_request_s: float, per_token_s: float, **changes: object) -> Slice:
    tokens = requests * output_tokens
    cpu_s = requests * per_request_s + tokens * per_token_s
    facts = {
        "output_tokens": output_tokens,
        "requests": requests,
        "tokens": tokens,
        "wall_s": 5.0,
        "cpu_s": {"gateway": cpu_s, "API server": 2 * cpu_s, GENERATOR: cpu_s / 10},
    }
    return Slice(**(facts | changes))


def a_side(**changes: object) -> gateway.Side:
    slices = [a_slice(16, 900, 1e-3, 40e-6), a_slice(64, 300, 1e-3, 40e-6, **changes)] * 3
    return gateway.Side(["http://a"], dict, 5.0, slices)


def by_metric(rows) -> dict[str, object]:
    return {row.metric: row for row in rows}


def test_slices_of_two_lengths_tell_requests_from_tokens():
    assert split(a_side().slices, "gateway") == (pytest.approx(1e-3), pytest.approx(40e-6))


def test_errors_of_all_slices_are_summed_by_kind():
    assert errors(a_side(errors={"http 503": 2}).slices) == {"http 503": 6}


def test_the_gateways_rows_hold_throughput_costs_and_the_peer():
    plan = gateway.GatewayPlan(model="m")
    ours, theirs = a_side(), a_side()
    rows = by_metric([*gateway.throughput(plan, ours), *gateway.costs(plan, ours), *gateway.beside(ours, theirs, "")])
    assert rows["requests of 16 streamed tokens"].value == 180
    assert rows["requests of 16 streamed tokens"].met
    assert rows["errors"].met
    assert rows["CPU per request, gateway"].value == pytest.approx(1.0)
    assert rows["CPU per token, load generator"].value == pytest.approx(4.0)
    beside = rows["gateway CPU per token"]
    assert (beside.value, beside.peer_value) == (pytest.approx(40), pytest.approx(80))
    assert (beside.ratio, beside.met) == (pytest.approx(0.5), True)


def test_a_peer_that_is_not_there_leaves_the_goal_unmeasured_and_says_why():
    (row,) = gateway.beside(a_side(), None, "needs a newer processor")
    assert (row.met, row.note) == (None, "not compared: needs a newer processor")
    assert not list(gateway.beside(a_side(), None, ""))


class Steady:
    """An engine of a given speed; `fails_at` is the batch that it does not answer. Asked again it is twice as fast."""

    def __init__(
        self, name: str, tokens_per_s: float, fails_at: int | None = None, *, caches: bool = True, first_s: float = 0.1
    ) -> None:
        self.name = name
        self.caches = caches
        self._first_s = first_s
        self.texts: list[list[str]] = []
        self._rate = tokens_per_s
        self._fails_at = fails_at

    async def run(self, prompts: Sequence[str], output_tokens: int, timeout_s: float) -> Batch:
        again = self.caches and list(prompts) in self.texts
        self.texts.append(list(prompts))
        if len(self.texts) == self._fails_at:
            raise CannotMeasure(f"{self.name} broke")
        tokens = len(prompts) * output_tokens
        first_s = self._first_s / 2 if again else self._first_s
        firsts = [first_s * (index + 1) for index in range(len(prompts))]
        return Batch(tokens, tokens / self._rate, firsts, 1024 if again else 0, 1e-5 * tokens)


async def test_every_engine_gets_the_same_prompts_round_by_round():
    plan = peers.PeersPlan(model="m", streams=(1, 4), rounds=3, input_tokens=8, output_tokens=16)
    ours, theirs = Steady(peers.SHOAL, 50.0), Steady("other", 100.0)
    missing: dict[str, str] = {}
    results = await peers.rounds(plan, [ours, theirs], missing)
    assert ours.texts == theirs.texts
    assert [len(texts) for texts in ours.texts] == [1] * 4 + [4] * 4
    assert len({text for texts in ours.texts for text in texts}) == 20
    rows = by_metric(peer_rows.rows(results, peers.SHOAL, plan.streams, {}))
    assert rows["output, 4 streams"].ratio == pytest.approx(0.5)
    assert rows["output, 4 streams"].peer == "other"
    assert rows["first token p50, 4 streams"].value == pytest.approx(200)
    assert rows["first token p95, 4 streams"].value == pytest.approx(400)
    assert not missing


async def test_a_peer_that_breaks_is_a_row_with_the_reason_and_shoal_goes_on():
    plan = peers.PeersPlan(model="m", streams=(2,), rounds=3)
    ours, theirs = Steady(peers.SHOAL, 50.0), Steady("other", 100.0, fails_at=3)
    missing: dict[str, str] = {}
    results = await peers.rounds(plan, [ours, theirs], missing)
    rows = [*peers.report_rows(plan, peers.Measured(results=results), missing)]
    assert (len(ours.texts), len(theirs.texts)) == (4, 3)
    assert rows[0].value == pytest.approx(50)
    assert rows[0].peer is None
    assert (rows[-1].metric, rows[-1].value, rows[-1].note) == ("not measured: other", None, "other broke")
    report = Report(bench="peers", date="", machine={}, command="", ran_on={}, rows=rows)
    assert report.exit_code == 0


async def test_shoal_itself_that_breaks_cannot_be_measured():
    plan = peers.PeersPlan(model="m", streams=(1,), rounds=1)
    with pytest.raises(CannotMeasure, match="shoal broke"):
        await peers.rounds(plan, [Steady(peers.SHOAL, 1.0, fails_at=1)], {})


def report(rows: list) -> Report:
    return Report(bench="peers", date="", machine={}, command="", ran_on={}, rows=rows)


@pytest.mark.parametrize(("ours", "met"), [(130.0, True), (129.0, False)])
async def test_throughput_beside_a_peer_has_its_goal(ours, met):
    plan = peers.PeersPlan(model="m", streams=(8,), rounds=2)
    both = [Steady(peers.SHOAL, ours), Steady(peer_rows.OPENVINO, 100.0, caches=False)]
    measured = peers.Measured(results=await peers.rounds(plan, both, {}))
    rows = [*peers.report_rows(plan, measured, {})]
    assert (rows[0].metric, str(rows[0].goal), rows[0].met) == ("output, 8 streams", "ratio >= 1.3", met)
    assert report(rows).exit_code == (0 if met else 1)
    shorter = peers.PeersPlan(model="m", streams=(8,), output_tokens=16)
    assert not any(row.goal for row in peers.report_rows(shorter, measured, {}) if row.peer)


async def test_the_generators_own_cost_per_token_is_told():
    plan = peers.PeersPlan(model="m", streams=(8,), rounds=2)
    measured = peers.Measured(results=await peers.rounds(plan, [Steady(peers.SHOAL, 50.0)], {}))
    row = by_metric(peers.report_rows(plan, measured, {}))["load generator CPU per token, 8 streams"]
    assert (row.value, row.met) == (pytest.approx(10), True)


async def test_a_goal_whose_peer_is_not_there_was_not_measured():
    plan = peers.PeersPlan(model="m", streams=(1,), rounds=1)
    missing = {peer_rows.OPENVINO: "no wheel"}
    ours = [Steady(peers.SHOAL, 50.0)]
    measured = peers.Measured(
        results=await peers.rounds(plan, ours, missing), firsts=await first_token.rounds(ours, missing, 1, 0)
    )
    rows = [*peers.report_rows(plan, measured, missing)]
    unmet = [(row.metric, row.met, row.note) for row in rows if row.goal and row.peer]
    said = "not compared with OpenVINO GenAI: no wheel"
    assert unmet == [
        ("output, 1 stream", None, said),
        ("first token of 1,040 tokens, nothing cached", None, said),
    ]
    assert report(rows).exit_code == 2


async def test_first_tokens_are_compared_new_and_again_with_a_fresh_prompt_each_round():
    ours = Steady(peers.SHOAL, 50.0, first_s=0.2)
    vllm = Steady(peer_rows.VLLM, 50.0, first_s=0.5)
    openvino = Steady(peer_rows.OPENVINO, 50.0, caches=False, first_s=0.2)
    found = await first_token.rounds([ours, vllm, openvino], {}, 3, seed=1)
    assert ours.texts == vllm.texts
    assert openvino.texts == ours.texts[::2]
    assert len({text for (text,) in ours.texts}) == 4
    assert all(len(text.split()) == first_token.PROMPT_TOKENS for (text,) in ours.texts)
    rows = [*first_token.rows(found, peers.SHOAL, peer_rows.FIRST_TOKEN)]
    figures = [(row.peer, row.value, row.ratio, row.met) for row in rows if row.peer]
    assert figures == [
        (peer_rows.VLLM, pytest.approx(200), pytest.approx(0.4), True),
        (peer_rows.OPENVINO, pytest.approx(200), pytest.approx(1.0), False),
        (peer_rows.VLLM, pytest.approx(100), pytest.approx(0.4), True),
    ]
    assert (rows[-1].metric, rows[-1].value) == ("prompt found in the cache, least of 3", 1024)


def a_first(ms: float, shared: int = 0, ids: tuple[int, ...] = (1, 2)) -> cold.First:
    return cold.First(ms, list(ids), Usage(cached={types_pb2.KV_TIER_SHARED: shared}))


def test_the_cold_rows_compare_computed_with_shared():
    rounds = [cold.Round(a_first(3000), a_first(80), a_first(300 + n, shared=1024), a_first(90)) for n in range(3)]
    rows = by_metric(cold.rows(cold.ColdPlan(model="m"), rounds))
    assert rows["first token of 1040 tokens, computed"].value == 3000
    assert rows["computed / shared tier, median of pairs"].value == pytest.approx(3000 / 301)
    assert all(row.met for row in rows.values() if row.goal is not None)


def test_a_tier_that_gave_nothing_or_changed_the_answer_misses_its_goals():
    rounds = [cold.Round(a_first(3000), a_first(80), a_first(2900, shared=0, ids=(1, 9)), a_first(90))]
    rows = by_metric(cold.rows(cold.ColdPlan(model="m"), rounds))
    assert [name for name, row in rows.items() if row.met is False] == [
        "computed / shared tier, median of pairs",
        "prompt tokens from the shared tier, least of 1",
        "rounds whose four answers differ",
    ]
