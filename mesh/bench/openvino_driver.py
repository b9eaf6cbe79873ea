"""Runs in the OpenVINO peer's own environment, needs nothing of Shoal's: `python openvino_driver.py MODEL.gguf`.

Reads one JSON line per batch from stdin, {"prompts": [text], "output_tokens": n}, and answers with one on stdout,
{"wall_s", "first_s": [seconds to each prompt's first token], "tokens": [of each answer]}. Its first line says ready.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

CACHE_GIB = 2
STEP_TOKENS = 2048


def main(model: str) -> None:
    """Until stdin ends. The library prints to stdout; what the driver has to say keeps a descriptor of its own."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        serve(importlib.import_module("openvino_genai"), model, sys.stdin, out)


def serve(genai: Any, model: str, lines: Iterable[str], out: TextIO) -> None:
    """Answer each line of `lines` with one on `out`, after one that says ready."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    print(json.dumps({"ready": True, "version": genai.__version__}), file=out)
    numbers = 0
    for line in lines:
        batch = json.loads(line)
        answer = run(genai, pipeline, batch["prompts"], batch["output_tokens"], numbers)
        numbers += len(batch["prompts"])
        print(json.dumps(answer), file=out)


def run(genai: Any, pipeline: Any, prompts: list[str], output_tokens: int, first_number: int) -> dict[str, Any]:
    """All prompts at once, greedy and of full length; the loop that the library's own generate() runs."""
    config = genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    began = time.perf_counter()
    handles = [pipeline.add_request(first_number + index, text, config) for index, text in enumerate(prompts)]
    first_s: list[float | None] = [None] * len(handles)
    tokens = [0] * len(handles)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - began
        for index, handle in enumerate(handles):
            while handle.can_read():
                tokens[index] += sum(len(part.generated_ids) for part in handle.read().values())
                first_s[index] = now if first_s[index] is None else first_s[index]
    return {"wall_s": time.perf_counter() - began, "first_s": first_s, "tokens": tokens}


if __name__ == "__main__":
    main(sys.argv[1])
