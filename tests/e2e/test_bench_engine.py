"""The sections of `shoal bench engine` that need whole meshes, in small and with an engine that computes nothing."""

import pytest

from mesh.bench.engine import interference, static
from mesh.bench.engine.plan import EnginePlan, Interference, Static
from mesh.models import DEFAULT_MODEL

pytestmark = pytest.mark.e2e


def test_a_long_prompt_is_measured_beside_streams():
    shape = Interference(presets=("latency",), streams=3, prompt_tokens=600, stream_tokens=1200, window_s=0.3)
    found = interference.measure(EnginePlan(model=DEFAULT_MODEL, engine="simulated", rounds=1, interference=shape))
    gap, first = found.rows
    assert gap.metric == "p99 gap of 3 streams while 600 tokens enter, preset latency"
    assert (gap.peer, first.peer) == ("undisturbed", "alone")
    assert all(figure and figure > 0 for row in found.rows for figure in (row.value, row.peer_value, row.ratio))
    assert found.facts["engine"] == "simulated"


def test_closed_batches_and_arrivals_are_measured_with_both_policies():
    shape = Static(requests=9, open_requests=5, prompt_tokens=(16, 32), answer_tokens=(4, 40), system_tokens=32)
    found = static.measure(EnginePlan(model=DEFAULT_MODEL, engine="simulated", rounds=1, static=shape))
    rows = {row.metric: row for row in found.rows}
    assert rows["output, mixed prompts"].peer_value
    capped = rows["peak KV in use, mixed prompts"]
    assert 0 < capped.value <= 22  # of the 8 x 5 blocks of the longest prompts and answers
    assert "22 blocks" in capped.note
    assert rows["p99 latency at 80 % of static's capacity"].ratio
    assert rows["answers that differ, mixed prompts"].met is True
    assert rows["answers that differ, a shared system prompt"].met is True
