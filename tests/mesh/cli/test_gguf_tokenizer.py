"""tokenizer.json made from a GGUF, held against transformers' own conversion and SmolLM2's published definition."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from mesh.cli.gguf_tokenizer import write_tokenizer
from mesh.cli.problem import Problem

from .conftest import write_tiny_gguf

PROSE = [
    "",
    " ",
    "What is the capital of France?",
    "The quick brown fox jumps over the lazy dog's tail, doesn't it? We'll see; they've said I'm late.",
    "  leading, trailing and   inner    spaces   ",
    "line one\nline two\n\n\nline five\r\nwindows\r\n\ttab\t\ttabs \t mixed",
    "Ünïcödé — “quotes”, ‘single’, ellipsis… ¿qué? ¡sí! Ångström naïve façade",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",
    "你好，世界。日本語のテキスト。안녕하세요 세계. ไทย हिन्दी தமிழ்",
    "emoji 😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 and combining e\u0301 a\u0308 zero\u200bwidth \ufeffbom",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\nclass A:\n\tpass\n",
    'for (int i = n; i > m; --i) { a[i] ^= ~b->c; } /* "quoted" \\n */ #include <stdio.h>',
    '{"key": [true, null], "text": "\\u00e9"}',
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>org/name<file_sep>a.py <|im_start <|not_a_token|>",
    "https://example.org/path?query=value&other=%zz#fragment user@example.org",
    "ALLCAPS MiXeDcAsE snake_case kebab-case camelCase",
    "x" * 300,
    "\u00a0non-breaking\u2003em space\u3000ideographic",
]
# Digits are where transformers' conversion ignores what `smollm` means; see reference().
NUMBERS = [
    "3.14159, 1,000,000 and 2024-11-29T13:05:00Z",
    "  12  345\t6\n7 8",
    "room 101, a1b2c3, 0xdeadbeef, 1e-9",
    "x² + y³ = ½ Ⅷ ٣٤٥ १२३ ①②",
    "In 1969 there were 3 of them; $19.99 (20% off).",
]


@pytest.fixture(scope="module")
def ours(smollm2) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2.tokenizer))


@pytest.fixture(scope="module")
def bare_gguf(smollm2, tmp_path_factory) -> Path:
    """The GGUF alone in a folder: beside a tokenizer.json transformers would look at that instead."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "model.gguf").symlink_to(next(smollm2.path.glob("*.gguf")))
    return folder


@pytest.fixture(scope="module")
def converted(bare_gguf):
    """What transformers makes of the same GGUF."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bare_gguf, gguf_file="model.gguf")


@pytest.fixture(scope="module")
def reference(converted) -> Tokenizer:
    """transformers' conversion with the pre-tokenizer of SmolLM2's own tokenizer.json, which a GGUF only names."""
    tokenizer = Tokenizer.from_str(converted.backend_tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("text", PROSE)
def test_ids_equal_transformers_own_conversion(ours, converted, text):
    assert ours.encode(text).ids == converted.backend_tokenizer.encode(text).ids


@pytest.mark.parametrize("text", PROSE + NUMBERS)
def test_ids_equal_the_published_definition_and_decode_to_the_text(ours, reference, text):
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == reference.encode(text).ids
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token_of_its_own(ours):
    assert ours.encode("a  2024").tokens == ["a", "ĠĠ", "2", "0", "2", "4"]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_gets_the_reference_ids(ours, reference, text):
    assert ours.encode(text).ids == reference.encode(text).ids


# The vocabulary lacks a few bytes (some control characters, planes above 3), so only these survive for sure.
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=60))
def test_decoding_gives_the_text_back(ours, text):
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_the_folder_and_renders_chats_as_from_the_gguf(smollm2, converted):
    from transformers import AutoTokenizer

    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 17 times 3?"},
        {"role": "assistant", "content": "51 — 😀"},
        {"role": "user", "content": "  Thanks\n"},
    ]
    written = AutoTokenizer.from_pretrained(smollm2.path)
    for messages in (turns, turns[1:], turns[:2]):
        for prompt in (True, False):
            text = written.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert text == converted.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert written.eos_token_id == converted.eos_token_id == 2
    assert written.bos_token_id == converted.bos_token_id == 1
    assert written.model_max_length == 8192


def test_control_and_user_defined_tokens_stay_whole_and_only_control_is_special(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    write_tokenizer(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|><think>hell").ids
    assert ids[:2] == [1, 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>hell"


def test_an_unknown_pre_tokenizer_is_refused_rather_than_guessed(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", pre="martian")
    with pytest.raises(Problem, match="'martian'"):
        write_tokenizer(tmp_path / "tiny.gguf", tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
