"""The openai package is the client most people have: it must take our answers and our errors for what they are."""

import openai
import pytest

from mesh.errors import Overloaded

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def client(mesh):
    base = f"http://127.0.0.1:{mesh.gateway.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=1) as client:
        yield client


async def test_chat_whole_and_streamed(mesh, play, ids_of, client):
    mesh.worker.scripts = [play.says(ids_of("Paris."))]
    whole = await client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, temperature=0)
    assert whole.choices[0].message.content == "Paris."
    stream = await client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris."
    assert chunks[-1].usage.completion_tokens > 0
    streamed, at_once = (usage.model_dump(exclude={"timing"}) for usage in (chunks[-1].usage, whole.usage))
    assert streamed == at_once


async def test_completions_whole_and_streamed(mesh, play, ids_of, client):
    mesh.worker.scripts = [play.says(ids_of(" Paris."))]
    whole = await client.completions.create(model="smollm2-135m", prompt="France:", logprobs=1)
    assert whole.choices[0].text == " Paris."
    stream = await client.completions.create(model="smollm2-135m", prompt="France:", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " Paris."


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["smollm2-135m"]


async def test_a_bad_field_is_a_bad_request_that_names_it(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"


async def test_an_error_in_mid_stream_is_raised(mesh, play, ids_of, client):
    mesh.worker.scripts = [play.first(4, play.says(ids_of("one two three four")), play.resets)]
    stream = await client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="worker"):
        async for _ in stream:
            pass


async def test_a_full_queue_is_a_429_that_the_client_waits_out(mesh, play, ids_of, client):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    mesh.scheduler.error = Overloaded("the queue is full", code="queue_full", retry_after_s=0.2)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.with_options(max_retries=0).chat.completions.create(model="smollm2-135m", messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "queue_full"
