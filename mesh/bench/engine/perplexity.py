"""What a precision costs in quality: how well the model predicts a real text in it, beside bf16 and fp32.

The text is Python's own language reference as every CPython carries it (`pydoc_data.topics`, PSF License): English
prose that people wrote, with some code in it. It is cut into windows; a token is predicted from those before it in its
window.
"""

import hashlib
import math
import pydoc_data.topics
import sys
from collections.abc import Iterator, Mapping

from mesh import models
from mesh.bench import measurer
from mesh.bench.engine.plan import EnginePlan, Found
from mesh.bench.report import CannotMeasure, Goal, Row
from mesh.bench.tuning import Tuning

# The chapters with the most prose come first; as many are read as are needed.
TOPICS = ("objects", "naming", "execmodel", "import", "try", "exceptions", "compound", "specialnames", "debugger")
# How much more perplexing than in bf16 the text may be.
MOST_MORE = {"int8": 0.15, "int4": 0.3}
REFERENCE = "bf16"


def measure(plan: EnginePlan) -> Found:
    """A precision that this worker has not is a row with the reason. Raises CannotMeasure if it has none of them."""
    windows, digest = _windows(plan)
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for precision in plan.precisions:
        env = {"SHOAL_MODEL": plan.model, **Tuning(precision=precision).env(kind=plan.engine)}
        try:
            told = measurer.run("perplexity", env, {"windows": windows}, f"perplexity, {precision}")
        except CannotMeasure as reason:
            missing[precision] = str(reason)
            continue
        predicted = sum(len(window) - 1 for window in windows)
        values[precision] = math.exp(sum(told["nll"]) / predicted)
    if not values:
        raise CannotMeasure("; ".join(dict.fromkeys(missing.values())))
    tokens = sum(map(len, windows))
    text = (
        f"Python {sys.version_info.major}.{sys.version_info.minor} reference (PSF License), {tokens} tokens in windows"
    )
    facts = {"text": f"{text} of {plan.window_tokens}, sha256 {digest[:12]}"}
    return Found([*rows(values, missing)], facts)


def _windows(plan: EnginePlan) -> tuple[list[list[int]], str]:
    """The text's tokens in windows, all of them full, and the text's sha256."""
    from tokenizers import Tokenizer

    text = "\n".join(pydoc_data.topics.topics[name] for name in TOPICS if name in pydoc_data.topics.topics)
    tokenizer = Tokenizer.from_file(str(models.find(plan.model).tokenizer))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids[: plan.text_tokens]
    starts = range(0, len(ids) - plan.window_tokens + 1, plan.window_tokens)
    windows = [ids[start : start + plan.window_tokens] for start in starts]
    if not windows:
        raise CannotMeasure(f"the text has {len(ids)} tokens, less than a window of {plan.window_tokens}")
    return windows, hashlib.sha256(text.encode()).hexdigest()


def rows(values: Mapping[str, float], missing: Mapping[str, str]) -> Iterator[Row]:
    """Each precision's perplexity; then how much more it is than in bf16 and fp32, with the goals."""
    for precision, value in values.items():
        yield Row(metric=f"perplexity, {precision}", value=value)
    for precision, most in MOST_MORE.items():
        why = missing.get(precision) or missing.get(REFERENCE) or ""
        both = precision in values and REFERENCE in values
        if both or why:
            yield Row(
                metric=f"perplexity above {REFERENCE}, {precision}",
                value=values[precision] - values[REFERENCE] if both else None,
                goal=Goal("<=", most),
                note=why,
            )
        if precision in values and "fp32" in values:
            yield Row(metric=f"perplexity above fp32, {precision}", value=values[precision] - values["fp32"])
