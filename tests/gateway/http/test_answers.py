"""What a client gets back over HTTP, streamed and whole: the same text, the same usage."""

import pytest

FANCY = "Paris 很好, 안녕하세요 👩‍👩‍👧‍👦!"
PATHS = ["/v1/chat/completions", "/v1/completions"]


def text_of(response, index=0):
    choice = response.json()["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def counted(usage):
    """What of it depends on no clock."""
    return {name: value for name, value in usage.items() if name != "timing"}


@pytest.mark.parametrize("path", PATHS)
async def test_a_character_split_over_tokens_arrives_whole_in_both_modes(mesh, play, ids_of, ask, path):
    mesh.worker.scripts = [play.says(ids_of(FANCY))]
    stream = await ask(path, stream=True, max_tokens=500)
    assert stream.text() == FANCY
    assert all("\ufffd" not in text for text in stream.texts())
    assert len(stream.texts()) > 5
    assert text_of(await ask(path, max_tokens=500)) == FANCY


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_cut_inside_a_character_reads_alike_in_both_modes(mesh, play, ids_of, ask, path):
    answer = ids_of("很")
    assert len(answer) > 1
    mesh.worker.scripts = [play.says(answer)]
    stream = await ask(path, stream=True, max_tokens=1, stream_options={"include_usage": True})
    whole = await ask(path, max_tokens=1)
    assert stream.text() == text_of(whole) == "\ufffd"
    assert stream.reason() == whole.json()["choices"][0]["finish_reason"] == "length"
    assert counted(stream.usage) == counted(whole.json()["usage"])
    assert whole.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 4])
async def test_stop_text_over_several_tokens_is_never_seen(mesh, play, ids_of, ask, path, batch):
    parts = ["ABC", "DEF", "G", "HI", "J", "K", "LMN"]
    answer = [token for part in parts for token in ids_of(part)] + ids_of(" tail") * 200
    mesh.worker.scripts = [play.says(answer, batch=batch)]
    stream = await ask(path, stream=True, max_tokens=500, stop=["DEFGHIJ"], stream_options={"include_usage": True})
    assert (stream.text(), stream.reason()) == ("ABC", "stop")
    whole = await ask(path, max_tokens=500, stop="DEFGHIJ")
    assert text_of(whole) == "ABC"
    kept = sum(len(ids_of(part)) for part in parts[:5])
    assert counted(stream.usage) == counted(whole.json()["usage"])
    assert stream.usage["completion_tokens"] == kept
    assert [entry.keep_tokens for stop in mesh.worker.stops for entry in stop.choices] == [kept, kept]


async def test_a_false_start_of_a_stop_arrives_whole(mesh, play, ids_of, ask):
    answer = [token for part in ("ABC", "DEF", "X") for token in ids_of(part)]
    mesh.worker.scripts = [play.says(answer)]
    stream = await ask(stream=True, max_tokens=50, stop=["DEFGHIJ"])
    assert stream.text() == "ABCDEFX"
    assert stream.reason() == "stop"
    assert mesh.worker.stops == []


async def test_logprobs_of_a_stop_text_are_not_told(mesh, play, ids_of, ask):
    answer = [token for part in ("ABC", "DEF", "G", "HI", "J") for token in ids_of(part)]
    mesh.worker.scripts = [play.says(answer)]
    stream = await ask(stream=True, max_tokens=50, stop=["DEFGHIJ"], logprobs=True, top_logprobs=2)
    told = [t for choice in stream.choices() if choice["logprobs"] for t in choice["logprobs"]["content"]]
    assert "".join(t["token"] for t in told) == "ABC"
    assert all(len(t["top_logprobs"]) == 2 for t in told)


@pytest.mark.parametrize("path", PATHS)
async def test_logprobs_come_with_every_token_in_both_modes(mesh, play, ids_of, ask, path):
    mesh.worker.scripts = [play.says(ids_of(FANCY))]
    asked = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    stream = await ask(path, stream=True, max_tokens=500, **asked)
    whole = (await ask(path, max_tokens=500, **asked)).json()["choices"][0]["logprobs"]
    pieces = [choice["logprobs"] for choice in stream.choices() if choice["logprobs"]]
    if "chat" in path:
        told = [token for piece in pieces for token in piece["content"]]
        assert told == whole["content"]
        assert bytes(b for token in told for b in token["bytes"]).decode() == FANCY
    else:
        assert [offset for piece in pieces for offset in piece["text_offset"]] == whole["text_offset"]
    assert stream.text() == FANCY


async def test_usage_is_the_same_streamed_and_not_and_in_the_metrics(mesh, play, ids_of, ask):
    mesh.worker.scripts = [play.says(ids_of(FANCY), ids_of("short"), cached=16, stop_token=1, batch=3)]
    whole = (await ask(n=2)).json()
    stream = await ask(n=2, stream=True, stream_options={"include_usage": True})
    expected = len(ids_of(FANCY)) + len(ids_of("short")) + 2
    assert counted(whole["usage"]) == counted(stream.usage)
    assert whole["usage"]["completion_tokens"] == expected
    assert whole["usage"]["total_tokens"] == expected + whole["usage"]["prompt_tokens"]
    assert whole["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 16,
        "cached_tokens_by_tier": {"device": 16, "shared": 0},
    }
    async with mesh.http() as client:
        metrics = (await client.get("/metrics")).text
    assert f'shoal_gateway_tokens_total{{kind="completion",model="smollm2-135m"}} {2.0 * expected}' in metrics
    prompt = 2.0 * whole["usage"]["prompt_tokens"]
    assert f'shoal_gateway_tokens_total{{kind="prompt",model="smollm2-135m"}} {prompt}' in metrics


@pytest.mark.parametrize("path", PATHS)
async def test_usage_tells_precision_recomputed_tokens_and_times_in_both_modes(mesh, play, ids_of, ask, path):
    answer = ids_of("one two three")
    mesh.worker.scripts = [play.says(answer)]
    whole = (await ask(path)).json()["usage"]
    stream = await ask(path, stream=True, stream_options={"include_usage": True})
    for usage in (whole, stream.usage):
        assert (usage["precision"], usage["recomputed_tokens"]) == ("fp32", 2)
        assert usage["timing"].pop("queue_ms") >= 0
        assert usage["timing"] == {
            "worker_queue_ms": 0,  # as Accepted said
            "first_token_ms": 40,
            "steps": len(answer),
            "median_step_ms": 7.6,
            "max_step_ms": 30.1,
        }


async def test_the_usage_chunk_comes_last_and_only_when_asked(mesh, play, ids_of, ask):
    mesh.worker.scripts = [play.says(ids_of("hello"))]
    asked = await ask(stream=True, stream_options={"include_usage": True})
    assert asked.chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in asked.chunks[:-1])
    unasked = await ask(stream=True)
    assert all("usage" not in chunk for chunk in unasked.chunks)
    assert asked.done
    assert unasked.done


async def test_an_empty_answer_still_opens_and_finishes(mesh, play, ask):
    mesh.worker.scripts = [play.says([], stop_token=1)]
    stream = await ask(stream=True, stream_options={"include_usage": True})
    assert stream.choices()[0]["delta"] == {"role": "assistant", "content": ""}
    assert (stream.text(), stream.reason(), stream.usage["completion_tokens"]) == ("", "stop", 1)
    assert (await ask()).json()["choices"][0]["message"]["content"] == ""


async def test_each_of_n_choices_has_its_own_text_and_one_finish(mesh, play, ids_of, ask):
    answers = ["one", "two three", "DEF stop here", "four five six seven"]
    mesh.worker.scripts = [play.says(*map(ids_of, answers))]
    stream = await ask(n=4, stream=True, stop=["stop"])
    whole = await ask(n=4, stop=["stop"])
    expected = ["one", "two three", "DEF ", "four five six seven"]
    assert [stream.text(i) for i in range(4)] == [text_of(whole, i) for i in range(4)] == expected
    assert [stream.reason(i) for i in range(4)] == ["stop"] * 4
    assert stream.lines.count("data: [DONE]") == 1


async def test_the_request_reaches_the_worker_as_it_was_asked(mesh, play, ids_of, ask):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    await ask(temperature=0.5, top_p=0.9, top_k=7, seed=11, logit_bias={"5": -2.5}, max_completion_tokens=9, user="u")
    [request] = mesh.worker.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 7, 11, 9)
    assert dict(sampling.logit_bias) == {5: -2.5}
    assert request.meta.request_id.startswith("chatcmpl-")
    assert request.worker_id == "w1"


async def test_a_seed_is_fixed_when_none_is_given(mesh, play, ids_of, ask):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    await ask()
    await ask()
    one, two = (request.sampling.seed for request in mesh.worker.requests)
    assert one != two


async def test_token_ids_and_a_list_of_one_text_are_prompts_too(mesh, play, ids_of, ask):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    await ask("/v1/completions", prompt=[5, 6, 7])
    await ask("/v1/completions", prompt=["Say"])
    assert list(mesh.worker.requests[0].prompt_ids) == [5, 6, 7]
    assert list(mesh.worker.requests[1].prompt_ids) == ids_of("Say")
    assert mesh.worker.requests[1].sampling.max_tokens == 16


async def test_models_are_those_that_workers_serve(mesh, eventually):
    async with mesh.http() as client:
        listed = (await client.get("/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["smollm2-135m"]
        assert (await client.get("/v1/models/smollm2-135m")).json()["context_tokens"] == 8192
        missing = await client.get("/v1/models/other/one")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        mesh.scheduler.healthy = False
        mesh.scheduler.changed()
        await eventually(lambda: mesh.gateway.missing)
        assert (await client.get("/v1/models")).json()["data"] == []
