"""A worker is told which of its features an answer depends on, so that none that lacks one begins it."""

import pytest

from gpu_worker.identity import FEATURES

MODEL = "smollm2-135m"
# What is asked, and the features that this alone depends on.
ASKED = [
    ({}, set()),
    ({"temperature": 0.7}, {"seed"}),
    ({"seed": 7}, set()),  # greedy: nothing is drawn
    ({"n": 2}, {"choices"}),
    ({"logit_bias": {"5": 1}}, {"logit_bias"}),
    ({"logprobs": 0}, {"logprobs"}),
    ({"min_p": 0.1}, {"min_p"}),
    ({"min_tokens": 1}, {"min_tokens"}),
    ({"presence_penalty": 0.5}, {"penalties"}),
    ({"frequency_penalty": -0.5}, {"penalties"}),
    ({"repetition_penalty": 1.1}, {"penalties"}),
    ({"repetition_penalty": 1, "presence_penalty": 0, "top_p": 0.5, "top_k": 3, "ignore_eos": True}, set()),
    ({"stop": "x"}, {"stop_choices"}),
    ({"stop_token_ids": [7]}, {"stop_token_ids"}),
    ({"response_format": {"type": "text"}}, set()),
    ({"response_format": {"type": "json_object"}}, {"structure"}),
    ({"structured_outputs": {"regex": "a+"}}, {"structure"}),
]


@pytest.mark.parametrize(("body", "features"), ASKED, ids=repr)
async def test_scheduler_and_worker_are_told_what_the_answer_depends_on(mesh, play, ask, ids_of, body, features):
    mesh.worker.scripts = [play.says(ids_of("ok"), ids_of("ok"))]
    assert (await ask("/v1/completions", **{"temperature": 0, **body})).status_code == 200
    assert set(mesh.worker.requests[0].required_features) == features
    assert set(mesh.scheduler.of_kind("open")[0].demand.required_features) == features


async def test_going_on_elsewhere_depends_on_resume(mesh, play, ask, ids_of):
    await mesh.add_worker(play.says(ids_of("one two three")))
    mesh.worker.scripts = [play.first(3, play.says(ids_of("one two three")), play.resets)]
    assert (await ask("/v1/completions", temperature=0)).status_code == 200
    begun, resumed = mesh.workers[0].requests[0], mesh.workers[1].requests[0]
    assert (list(begun.required_features), list(resumed.required_features)) == ([], ["resume"])


def test_every_feature_of_a_worker_is_asked_for_by_some_request():
    assert {"resume"}.union(*(features for _, features in ASKED)) == set(FEATURES)
