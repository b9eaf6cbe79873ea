"""Rows of the benchmarks that compare: what each side's figures become, and what happens to a peer that fails."""

from collections.abc import Sequence

import pytest

from mesh.bench import cold, gateway, peers
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
    """An engine of a given speed; `fails_at` is the batch that it does not answer."""

    def __init__(self, name: str, tokens_per_s: float, fails_at: int | None = None) -> None:
        self.name = name
        self.texts: list[list[str]] = []
        self._rate = tokens_per_s
        self._fails_at = fails_at

    async def run(self, prompts: Sequence[str], output_tokens: int, timeout_s: float) -> Batch:
        self.texts.append(list(prompts))
        if len(self.texts) == self._fails_at:
            raise CannotMeasure(f"{self.name} broke")
        tokens = len(prompts) * output_tokens
        return Batch(tokens, tokens / self._rate, [0.1 * (index + 1) for index in range(len(prompts))])


async def test_every_engine_gets_the_same_prompts_round_by_round():
    plan = peers.PeersPlan(model="m", streams=(1, 4), rounds=3, input_tokens=8, output_tokens=16)
    ours, theirs = Steady(peers.SHOAL, 50.0), Steady("other", 100.0)
    missing: dict[str, str] = {}
    results = await peers.rounds(plan, [ours, theirs], missing)
    assert ours.texts == theirs.texts
    assert [len(texts) for texts in ours.texts] == [1] * 4 + [4] * 4
    assert len({text for texts in ours.texts for text in texts}) == 20
    rows = by_metric(peers.rows(plan, results))
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
    rows = [*peers.rows(plan, results), *peers.not_measured(missing)]
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


def a_first(ms: float, shared: int = 0, ids: tuple[int, ...] = (1, 2)) -> cold.First:
    return cold.First(ms, list(ids), Usage(cached={types_pb2.KV_TIER_SHARED: shared}))


def test_the_cold_rows_compare_computed_with_shared():
    rounds = [cold.Round(a_first(3000), a_first(300 + n, shared=1024), a_first(90)) for n in range(3)]
    rows = by_metric(cold.rows(cold.ColdPlan(model="m"), rounds))
    assert rows["first token of 1040 tokens, computed"].value == 3000
    assert rows["computed / shared tier, median of pairs"].value == pytest.approx(3000 / 301)
    assert all(row.met for row in rows.values() if row.goal is not None)


def test_a_tier_that_gave_nothing_or_changed_the_answer_misses_its_goals():
    rounds = [cold.Round(a_first(3000), a_first(2900, shared=0, ids=(1, 9)), a_first(90))]
    rows = by_metric(cold.rows(cold.ColdPlan(model="m"), rounds))
    assert [name for name, row in rows.items() if row.met is False] == [
        "computed / shared tier, median of pairs",
        "prompt tokens from the shared tier, least of 1",
        "rounds whose three answers differ",
    ]
