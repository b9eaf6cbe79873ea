"""Rows with a grammar: what may come next, where it may end, and that it is a function of the emitted ids alone."""

import json
import random
import re

import numpy as np
import pytest
import torch
import xgrammar

from gpu_worker.engine.grammar import Grammar
from gpu_worker.engine.grammar_workshop import Job, Setup, Workshop
from gpu_worker.engine.rows import Row
from gpu_worker.engine.sampler import sample
from gpu_worker.engine.vocabulary import tokenizer_info
from mesh.sampling import Sampling
from tests.gpu_worker.engine.grammars import EOS, VOCAB, ids_of, spoken_folder, text_of

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def grammar_of(tmp_path_factory):
    """Compiles in this process."""
    folder = spoken_folder(tmp_path_factory.mktemp("spoken"))
    workshop = Workshop(Setup(str(folder.tokenizer), VOCAB, [EOS], 0.0))
    info = tokenizer_info(folder.tokenizer, VOCAB, [EOS])

    def grammar(structure: str, text: str) -> Grammar:
        compiled = workshop.compiled(Job(0, structure, text))
        assert not compiled.error
        return Grammar(xgrammar.CompiledGrammar.deserialize_json(compiled.serialized, info), VOCAB)

    return grammar


def row(grammar: Grammar, output: list[int], *, ending_ids=(EOS,), choice: int = 0, **options) -> Row:
    options = {"max_tokens": 100, "seed": 3} | options
    return Row(Sampling(**options), choice, [*PROMPT, *output], len(PROMPT), ending_ids, grammar.state())


def allowed(grammar: Grammar, said: str, **options) -> set[str]:
    """What may follow, the end being ""."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    row(grammar, ids_of(said), **options).adjust(logits)
    return {"" if token == EOS else text_of([token]) for token in np.flatnonzero(np.isfinite(logits)).tolist()}


def answer(grammar: Grammar, logits_seed: int = 0, start: str = "", **options) -> str:
    """Sampled from random logits until the end; each token from one row that follows."""
    follower = row(grammar, ids_of(start), **options)
    chance = torch.Generator().manual_seed(logits_seed)
    while follower.position < 200:
        [sampled] = sample(torch.randn(1, VOCAB, generator=chance) * 3, [follower])
        assert sampled is not None
        if sampled.token == EOS:
            break
        follower.ids.append(sampled.token)
    return text_of(follower.ids[len(PROMPT) :])


def test_only_what_the_grammar_allows_may_follow_and_the_end_only_where_it_may_end(grammar_of):
    grammar = grammar_of("regex", "ab(c|d)?")
    assert allowed(grammar, "") == {"a"}
    assert allowed(grammar, "a") == {"b"}
    assert allowed(grammar, "ab") == {"c", "d", ""}
    assert allowed(grammar, "abc") == {""}


def test_control_tokens_are_never_text(grammar_of):
    assert allowed(grammar_of("regex", ".*"), "a") == {""} | {chr(code) for code in range(32, 126)}
    assert "" not in allowed(grammar_of("regex", "a.+"), "a")


def test_min_tokens_holds_the_end_back_where_something_else_may_come(grammar_of):
    grammar = grammar_of("regex", "a{1,3}")
    assert allowed(grammar, "a", min_tokens=2) == {"a"}
    assert allowed(grammar, "aa", min_tokens=2) == {"a", ""}
    assert allowed(grammar, "aaa", min_tokens=50) == {""}


def test_stop_tokens_come_only_where_the_grammar_may_end(grammar_of):
    grammar, ends = grammar_of("regex", "[ab]{2}c?"), (EOS, *ids_of("b"))
    assert allowed(grammar, "", ending_ids=ends) == {"a"}
    assert allowed(grammar, "aa", ending_ids=ends) == {"c", "b", ""}


def test_bias_and_penalties_cannot_break_a_grammar(grammar_of):
    grammar = grammar_of("regex", "[xy]{3}")
    options = {"logit_bias": {ids_of("q")[0]: 100.0, EOS: 100.0}, "repetition_penalty": 2.0, "presence_penalty": 2.0}
    assert re.fullmatch("[xy]{3}", answer(grammar, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_answers_satisfy_their_structure(grammar_of, temperature, seed):
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer"},
              "name": {"type": "string", "maxLength": 5}}, "required": ["kind", "legs", "name"]}  # fmt: skip
    said = json.loads(answer(grammar_of("json_schema", json.dumps(schema)), seed, temperature=temperature))
    assert said["kind"] in ("cat", "dog")
    assert isinstance(said["legs"], int)
    assert len(said["name"]) <= 5
    assert re.fullmatch("[a-c]{2,9}-[0-9]+", answer(grammar_of("regex", "[a-c]{2,9}-[0-9]{1,4}"), seed))
    assert answer(grammar_of("grammar", 'root ::= "yes" | "no"'), seed) in ("yes", "no")


def test_a_row_made_anew_continues_as_the_old_one_would_have(grammar_of):
    grammar = grammar_of("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9}')
    said = answer(grammar, temperature=1.0)
    for end in range(len(said)):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(end))
        followed = row(grammar, [])
        for token in ids_of(said[:end]):
            followed.adjust(np.zeros(VOCAB, dtype=np.float32))
            followed.ids.append(token)
        assert sample(logits.clone(), [followed]) == sample(logits.clone(), [row(grammar, ids_of(said[:end]))])


def test_choices_of_one_grammar_do_not_disturb_each_other(grammar_of):
    grammar, chance = grammar_of("regex", "(aa|bb|cc){20}"), random.Random(1)
    rows = [row(grammar, [], choice=index) for index in range(4)]
    while any(len(one.ids) < len(PROMPT) + 40 for one in rows):
        one = chance.choice([one for one in rows if len(one.ids) < len(PROMPT) + 40])
        [sampled] = sample(torch.randn(1, VOCAB), [one])
        one.ids.append(sampled.token)
    assert all(re.fullmatch("(aa|bb|cc){20}", text_of(one.ids[len(PROMPT) :])) for one in rows)


def test_ids_that_the_grammar_does_not_allow_end_that_row_alone(grammar_of):
    grammar = grammar_of("regex", "[ab]{4}")
    wrong, right = row(grammar, ids_of("xy")), row(grammar, ids_of("ab"))
    first = sample(torch.zeros(3, VOCAB), [right, wrong, row(grammar, [])])
    assert [one is None for one in first] == [False, True, False]
    again = sample(torch.zeros(1, VOCAB), [wrong])
    assert again == [None], "what failed once stays failed"
