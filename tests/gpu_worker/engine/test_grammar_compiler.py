"""Where grammars come from: whatever a client sends, nobody waits for ever and only that text is refused."""

import json
import time

import pytest

from gpu_worker.engine.grammar import Grammar
from gpu_worker.engine.grammar_compiler import MOST_WAITING, GrammarCompiler
from gpu_worker.engine.grammar_process import WAITING
from mesh.errors import InvalidRequest, Overloaded
from mesh.sampling import Sampling
from tests.gpu_worker.engine.grammars import EOS, VOCAB, spoken_folder

WITHIN_S = 60.0
LIMIT_S = 2.0
# Seconds to compile, by a cost that grows with the square of the number of properties.
ENDLESS = json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}})
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


def wanted(compiler: GrammarCompiler, **structure: str):
    return compiler.prepare(Sampling(max_tokens=10, **structure))


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


def test_what_takes_too_long_is_ended_remembered_and_the_next_text_compiled(compiler):
    endless = wanted(compiler, json_schema=ENDLESS)
    after = wanted(compiler, regex="after")
    with pytest.raises(InvalidRequest, match="too much time") as caught:
        endless.result(WITHIN_S)
    assert caught.value.field == "json_schema"
    assert isinstance(after.result(WITHIN_S), Grammar)
    assert wanted(compiler, json_schema=ENDLESS) is endless


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
