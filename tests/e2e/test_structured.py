"""Structured answers of the real model through the whole mesh."""

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

import shoal

pytestmark = pytest.mark.e2e
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["city", "country", "population", "rivers"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
QUESTION = "Describe the capital of France as JSON."


def check(text: str) -> None:
    said = json.loads(text)
    assert list(said) == ["city", "country", "population", "rivers"]
    assert isinstance(said["city"], str)
    assert len(said["city"]) <= 20
    assert said["country"] in ("France", "Italy", "Spain")
    assert 0 <= said["population"] <= 100_000_000
    assert len(said["rivers"]) <= 3
    assert all(isinstance(river, str) and len(river) <= 12 for river in said["rivers"])


def ask(mesh: Any, **body: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": QUESTION}
    whole = {"model": mesh.plan.model, "messages": [turn], "temperature": 1, "seed": 3, "max_tokens": 400} | body
    return whole


def test_drawn_answers_parse_and_are_valid_for_each_of_n(mesh: Any) -> None:
    client = openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(**ask(mesh, response_format=FORMAT, n=2))
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert len(set(texts)) == 2
    for text in texts:
        check(text or "")


async def test_a_streamed_answer_is_the_whole_one(mesh: Any, chat: Callable[..., Awaitable[Any]]) -> None:
    options = {"temperature": 1, "seed": 8, "response_format": FORMAT}
    async with httpx.AsyncClient(timeout=60) as client:
        whole = (await client.post(f"{mesh.url}/v1/chat/completions", json=ask(mesh, **options))).json()
    streamed = await chat(mesh, QUESTION, max_tokens=400, **options)
    assert (streamed.finish, streamed.error) == ("stop", None)
    assert streamed.text == whole["choices"][0]["message"]["content"]
    check(streamed.text)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_regex_and_a_grammar_hold_the_answer(mesh: Any, temperature: float) -> None:
    for outputs, pattern in (
        ({"regex": r"[A-Z][a-z]{2,8}, \d{2}-\d{4}"}, r"[A-Z][a-z]{2,8}, \d{2}-\d{4}"),
        ({"grammar": 'root ::= ("yes" | "no") "." | "perhaps"'}, r"(yes|no)\.|perhaps"),
    ):
        body = ask(mesh, structured_outputs=outputs, temperature=temperature)
        [choice] = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
        assert re.fullmatch(pattern, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


async def test_the_thin_client_asks_for_the_same(mesh: Any) -> None:
    async with shoal.Client(mesh.state.grpc_address) as client:
        options: Any = {"model": mesh.plan.model, "json_schema": json.dumps(SCHEMA), "seed": 5, "max_tokens": 400}
        check("".join([piece.text async for piece in client.chat(QUESTION, **options)]))


def test_what_cannot_be_compiled_is_a_400_that_names_it_and_the_next_answer_comes(mesh: Any) -> None:
    bad = {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    reply = httpx.post(f"{mesh.url}/v1/chat/completions", json=ask(mesh, response_format=bad), timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format.json_schema.schema"
    good = httpx.post(f"{mesh.url}/v1/chat/completions", json=ask(mesh, response_format=FORMAT), timeout=60).json()
    check(good["choices"][0]["message"]["content"])
