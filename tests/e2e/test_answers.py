"""The default mesh answers one question the same over every door."""

import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

import shoal

pytestmark = pytest.mark.e2e
QUESTION = "What is the capital of France?"


@pytest.fixture
def ask(mesh: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": mesh.plan.model, "messages": messages, "temperature": 0, "max_tokens": 64}


@pytest.fixture
def expected(mesh: Any, ask: dict[str, Any]) -> str:
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=ask, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    return str(text)


def test_the_openai_package_gets_paris_streamed_and_not(mesh: Any, ask: dict[str, Any], expected: str) -> None:
    client = openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "stop"
    pieces, usage = [], None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == expected
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert len([piece for piece in pieces if piece]) > 3, "the stream came as one lump"
    assert [model.id for model in client.models.list()] == [mesh.plan.model]


async def test_the_clients_over_grpc_get_paris(mesh: Any, expected: str) -> None:
    async with shoal.Client(mesh.state.grpc_address) as client:
        text = "".join([piece.text async for piece in client.chat(QUESTION, model=mesh.plan.model, temperature=0)])
    assert text == expected


def test_the_synchronous_client_gets_paris(mesh: Any, expected: str) -> None:
    with shoal.SyncClient(mesh.state.grpc_address) as client:
        assert "".join(piece.text for piece in client.chat(QUESTION, model=mesh.plan.model, temperature=0)) == expected


def test_shoal_chat_prints_paris(mesh: Any, expected: str) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "mesh.cli.main", "chat", QUESTION, "--temperature", "0"],
        env=mesh.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == expected.strip()


def test_the_second_time_the_prompt_comes_from_the_cache(mesh: Any) -> None:
    prompt = "Shoal is a mesh. " * 40
    body = {"model": mesh.plan.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60).json()
    again = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again["usage"]["prompt_tokens"] - 16 <= cached + 1 <= again["usage"]["prompt_tokens"]


def test_a_seed_gives_the_same_answer_and_another_seed_another(mesh: Any, ask: dict[str, Any]) -> None:
    def text(seed: int) -> str:
        body = ask | {"temperature": 1.2, "seed": seed, "max_tokens": 24}
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60).json()
        return str(answer["choices"][0]["message"]["content"])

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1
