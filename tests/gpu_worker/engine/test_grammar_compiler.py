"""Where grammars come from: whatever a client sends, nobody waits for ever and only that text is refused."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.engine.grammar import Grammar
from gpu_worker.engine.grammar_compiler import MOST_WAITING, GrammarCompiler
from gpu_worker.engine.grammar_process import WAITING
from mesh.errors import Internal, InvalidRequest, Overloaded
from mesh.sampling import Sampling
from tests.gpu_worker.engine.grammars import EOS, VOCAB, spoken_folder

WITHIN_S = 60.0
LIMIT_S = 2.0
# Takes far more than LIMIT_S of time before it takes too much memory.
ENDLESS = "|".join(f"[a-z]{{1,{n}}}x" for n in range(2, 500))
# Refused for its memory long before its time.
LARGE_NAMES = [f"p{n}" for n in range(1000)]
LARGE = json.dumps({"properties": {name: {} for name in LARGE_NAMES}, "required": LARGE_NAMES})
# Each level offers the next one four times.
LEVELS = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(14)} | {"d14": {"type": "null"}}
DOUBLING = json.dumps({"$defs": LEVELS, "$ref": "#/$defs/d0"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return spoken_folder(tmp_path_factory.mktemp("spoken"))


@pytest.fixture(scope="module")
def compiler(folder):
    compiler = GrammarCompiler(folder.tokenizer, VOCAB, [EOS], limit_s=LIMIT_S)
    yield compiler
    compiler.close()


@pytest.fixture
def patient(folder):
    """One whose limit of time no test reaches, with its process up."""
    compiler = GrammarCompiler(folder.tokenizer, VOCAB, [EOS], limit_s=WITHIN_S)
    wanted(compiler, regex="up").result(WITHIN_S)
    yield compiler
    compiler.close()


def wanted(compiler: GrammarCompiler, **structure: str):
    return compiler.prepare(Sampling(max_tokens=10, **structure))


def endless(number: int) -> str:
    return f"{ENDLESS}|{number}"


def process_of(compiler: GrammarCompiler) -> int:
    return compiler._press._child.pid


def children_of(compiler: GrammarCompiler) -> list[str]:
    pid = process_of(compiler)
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_whoever_asks_for_no_structure_waits_for_nothing(compiler):
    assert compiler.prepare(Sampling(max_tokens=10)) is None


def test_a_text_is_compiled_once_and_remembered(compiler):
    first = wanted(compiler, regex="[a-z]+")
    assert isinstance(first.result(WITHIN_S), Grammar)
    assert wanted(compiler, regex="[a-z]+") is first


def test_one_text_means_different_things_by_its_field(compiler):
    as_regex, as_schema = wanted(compiler, regex="true"), wanted(compiler, json_schema="true")
    assert as_regex.result(WITHIN_S) is not as_schema.result(WITHIN_S)


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"regex": "((("}, "Regex"),
        ({"regex": r"(a)\1"}, "Backreference"),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": 'other ::= "a"'}, "root"),
        ({"grammar": 'root ::= root "a"'}, "nothing satisfies"),
        ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "Nest"),
        ({"json_schema": "false"}, "cannot accept any value"),
        ({"json_schema": '{"type": "nonsense"}'}, "nonsense"),
        ({"json_schema": '{"$ref": "#"}'}, "$ref"),
        ({"json_schema": '{"$ref": "#/$defs/missing"}'}, "missing"),
        ({"json_schema": '{"enum": []}'}, "enum"),
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "minimum"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_field_and_the_reason(compiler, structure, says):
    future = wanted(compiler, **structure)
    with pytest.raises(InvalidRequest) as caught:
        future.result(WITHIN_S)
    assert caught.value.field == next(iter(structure))
    assert says in caught.value.message
    assert "/project/" not in caught.value.message


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(a|b)*a(a|b){20}"},
        {"regex": "(((((a?){30}){30}){30}){30}){30}"},
        {"regex": "((a{1000}){1000}){1000}"},
        {"json_schema": '{"type": "object", "properties": {"next": {"$ref": "#"}}}'},
        {"json_schema": '{"type": "array", "minItems": 100000, "items": {"type": "string"}}'},
        {"json_schema": DOUBLING},
    ],
)
def test_what_looks_endless_is_compiled_or_refused_in_time(compiler, structure):
    wanted(compiler, regex="warm").result(WITHIN_S)
    began_s = time.monotonic()
    error = wanted(compiler, **structure).exception(WITHIN_S)
    assert error is None or (isinstance(error, InvalidRequest) and error.field == next(iter(structure)))
    assert time.monotonic() - began_s < LIMIT_S * WAITING + 1.0


def test_what_takes_too_long_is_ended_remembered_and_its_process_goes_on(compiler):
    wanted(compiler, regex="up").result(WITHIN_S)
    process = process_of(compiler)
    refused = wanted(compiler, regex=ENDLESS)
    with pytest.raises(InvalidRequest, match=r"too much time .* fewer alternatives") as caught:
        refused.result(WITHIN_S)
    assert caught.value.field == "regex"
    assert isinstance(wanted(compiler, regex="after").result(WITHIN_S), Grammar)
    assert wanted(compiler, regex=ENDLESS) is refused
    assert process_of(compiler) == process


def test_a_cheap_text_passes_expensive_ones(patient):
    expensive = [wanted(patient, regex=endless(number)) for number in range(4)]
    until(lambda: len(children_of(patient)) == 2)
    assert isinstance(wanted(patient, regex="[a-z]+cheap").result(WITHIN_S), Grammar)
    assert not any(future.done() for future in expensive)


def test_what_nobody_waits_for_any_more_is_ended_and_makes_room(patient):
    expensive = [wanted(patient, regex=endless(number)) for number in range(3)]
    until(lambda: len(children_of(patient)) == 2)
    begun = children_of(patient)
    for future in expensive:
        assert future.cancel()
    until(lambda: not children_of(patient))
    assert begun
    again = wanted(patient, regex=endless(0))
    assert again is not expensive[0]
    until(lambda: children_of(patient))


def test_what_takes_too_much_memory_is_refused(patient):
    with pytest.raises(InvalidRequest, match="too much memory"):
        wanted(patient, json_schema=LARGE).result(WITHIN_S)


def test_the_process_that_forks_runs_no_other_threads(patient):
    assert len(os.listdir(f"/proc/{process_of(patient)}/task")) == 1


def test_a_process_that_dies_fails_what_was_under_way_and_the_next_text_starts_another(patient):
    lost, process = wanted(patient, regex=ENDLESS), process_of(patient)
    os.kill(process, signal.SIGKILL)
    assert isinstance(lost.exception(WITHIN_S), Internal)
    assert isinstance(wanted(patient, regex="next").result(WITHIN_S), Grammar)
    assert process_of(patient) != process


def test_closing_leaves_no_process_of_either_generation(patient):
    wanted(patient, regex=ENDLESS)
    until(lambda: children_of(patient))
    processes = [str(process_of(patient)), *children_of(patient)]
    patient.close()
    until(lambda: not any(Path("/proc", pid).exists() for pid in processes))


def test_a_warm_compiler_has_its_process_before_anyone_asks(folder):
    compiler = GrammarCompiler(folder.tokenizer, VOCAB, [EOS], limit_s=LIMIT_S)
    assert compiler._press._info is None
    compiler.warm()
    until(lambda: compiler._press._info is not None)
    compiler.close()


def test_too_many_at_once_are_turned_away_with_when_to_come_again(folder):
    compiler = GrammarCompiler(folder.tokenizer, VOCAB, [EOS], limit_s=LIMIT_S)
    try:
        for number in range(MOST_WAITING):
            wanted(compiler, regex=f"x{number}")
        with pytest.raises(Overloaded) as caught:
            wanted(compiler, regex="one more")
        assert caught.value.retry_after_s
    finally:
        compiler.close()


def test_a_model_without_an_end_can_end_no_structure(folder):
    with pytest.raises(InvalidRequest) as caught:
        GrammarCompiler(folder.tokenizer, VOCAB, []).prepare(Sampling(max_tokens=10, regex="a"))
    assert caught.value.field == "regex"
