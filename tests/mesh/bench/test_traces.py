"""Traces read, spread and turned into prompts; prompts of a wanted length."""

import gzip
import json
import random
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mesh.bench import prompts, traces
from mesh.bench.report import CannotMeasure

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"
ROWS = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [0, 2]},
    {"timestamp": 3000, "input_length": 20, "output_length": 5, "hash_ids": [7]},
]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    return path


def test_json_lines_are_read_with_times_lengths_and_blocks(mooncake):
    rows = traces.read(mooncake)
    assert [(row.at_s, row.input_tokens, row.output_tokens, row.blocks) for row in rows] == [
        (0, 600, 3, (0, 1)),
        (0, 1024, 4, (0, 2)),
        (3, 20, 5, (7,)),
    ]
    assert len(traces.read(mooncake, limit=2)) == 2


def test_equal_block_ids_are_equal_words_and_others_are_not(mooncake):
    asks = list(traces.asks(traces.read(mooncake), speedup=1, most_input=None, seed=0))
    words = [ask.prompt.split(" ") for ask in asks]
    assert [len(each) for each in words] == [600, 1024, 20]
    assert words[0][:512] == words[1][:512]
    assert words[0][512:540] != words[1][512:540]
    assert [ask.output_tokens for ask in asks] == [3, 4, 5]


def test_arrivals_of_one_tick_are_spread_until_the_next_and_stay_in_order(mooncake):
    spread = list(traces.spread(traces.read(mooncake), seed=1))
    times = [row.at_s for row in spread]
    assert times == sorted(times)
    assert len(set(times)) == 3
    assert times[1] < 3 == times[2]
    assert times == [row.at_s for row in traces.spread(traces.read(mooncake), seed=1)]


def test_a_replay_may_be_faster_and_cut_prompts(mooncake):
    asks = list(traces.asks(traces.read(mooncake), speedup=2, most_input=513, seed=0))
    assert asks[2].at_s == 1.5
    assert [len(ask.prompt.split(" ")) for ask in asks] == [513, 513, 20]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", '{"timestamp": 1}\n', "line 1"),
        ("bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", "line 2"),
        ("other.csv", "a,b\n1,2\n", "ContextTokens"),
        ("empty.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_what_is_no_trace_is_told_by_its_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(CannotMeasure, match=said):
        traces.read(path)


@pytest.mark.parametrize("name", ["noise.csv", "noise.jsonl", "noise.csv.gz"])
def test_a_file_that_holds_something_else_is_told(tmp_path, name):
    path = tmp_path / name
    head = gzip.compress(b"TIMESTAMP,ContextTokens\n" * 50)[:12] if name.endswith(".gz") else b""
    path.write_bytes(head + b"\xff\xfe\x00" * 1000)
    with pytest.raises(CannotMeasure, match="cannot read the trace"):
        traces.read(path)


def test_a_trace_that_is_not_there_is_told(tmp_path):
    with pytest.raises(CannotMeasure, match="cannot read"):
        traces.read(tmp_path / "nothing.csv")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "rows", "span_s", "mean_input"),
    [
        ("azure_llm_2023_code.csv", 8819, 3436, 2048),
        ("mooncake_conversation_first10000.jsonl.gz", 10_000, 2988, 12_143),
    ],
)
def test_public_traces_read_as_their_page_says(name, rows, span_s, mean_input):
    found = traces.read(SHARED / name)
    assert len(found) == rows
    assert found[-1].at_s == pytest.approx(span_s, abs=1)
    assert sum(row.input_tokens for row in found) / rows == pytest.approx(mean_input, abs=1)


def test_arrivals_are_poisson_and_seeded():
    def times(seed: int) -> list[float]:
        return [ask.at_s for ask in islice(prompts.poisson(prompts.endless(1, 1, 0), rate=50, seed=seed), 1000)]

    assert times(1) == times(1) != times(2)
    assert times(1)[-1] == pytest.approx(20, rel=0.15)
    gaps = [later - earlier for earlier, later in zip(times(1), times(1)[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # as of an exponential distribution


def test_prompts_are_unlike_and_of_their_length():
    made = list(islice(prompts.endless(30, 5, seed=3), 20))
    assert len({ask.prompt for ask in made}) == 20
    assert all(len(ask.prompt.split()) == 30 for ask in made)


def test_a_word_is_one_token_of_the_default_model(smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer))
    text = prompts.text(2000, random.Random(0))
    assert len(tokenizer.encode(text).ids) == 2000
    assert len(set(prompts.WORDS)) == len(prompts.WORDS) > 100
