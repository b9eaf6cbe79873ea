"""The first token of a long prompt that nobody has seen, and of the same prompt asked again, beside other engines."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from mesh.bench import prompts
from mesh.bench.contender import Batch, Contender
from mesh.bench.contest import Contest
from mesh.bench.progress import bar
from mesh.bench.report import Goal, Row
from mesh.bench.stats import ratio_of_pairs

PROMPT_TOKENS = 1040
# Of an answer: the first and one more, which shows that it goes on.
OUTPUT_TOKENS = 2
NEW, CACHED = "nothing cached", "all cached"

# By engine and kind, one Batch a round.
Firsts = dict[str, dict[str, list[Batch]]]


@dataclass(frozen=True, slots=True)
class Bound:
    """A goal: our first token takes at most `ratio` of this peer's."""

    peer: str
    kind: str
    ratio: float


async def rounds(contenders: Sequence[Contender], missing: dict[str, str], number_of_rounds: int, seed: int) -> Firsts:
    """A new prompt each round, the same for all. Who keeps prompts is asked again at once."""
    found: Firsts = {contender.name: {} for contender in contenders}
    rng = random.Random(f"first tokens {seed}")  # or prompts would begin as those of the throughput batches do
    asked = sum(2 if contender.caches else 1 for contender in contenders)
    with bar("measuring first tokens", (number_of_rounds + 1) * asked) as shown:
        contest = Contest(contenders, missing, shown)
        for number in range(-1, number_of_rounds):
            text = prompts.text(PROMPT_TOKENS, rng)
            for contender in contenders:
                for kind in (NEW, CACHED) if contender.caches else (NEW,):
                    batch = await contest.run(contender, [text], OUTPUT_TOKENS, f"first token, {kind}")
                    if batch is not None and number >= 0:
                        found[contender.name].setdefault(kind, []).append(batch)
    return {name: kinds for name, kinds in found.items() if name not in missing}


def rows(found: Firsts, ours: str, bounds: Sequence[Bound]) -> Iterator[Row]:
    """Beside each peer, by kind; and how much of the prompt was there when it was asked again."""
    for kind in (NEW, CACHED):
        mine = found[ours][kind]
        others = [name for name in found if name != ours and kind in found[name]]
        if not others:
            yield Row(metric=_metric(kind), value=median(_ms(mine)), unit="ms")
        for name in others:
            yield _beside(kind, mine, name, found[name][kind], bounds)
    cached = [batch.cached_tokens for batch in found[ours][CACHED]]
    yield Row(metric=f"prompt found in the cache, least of {len(cached)}", value=min(cached), unit="tokens")


def _beside(kind: str, ours: list[Batch], peer: str, theirs: list[Batch], bounds: Sequence[Bound]) -> Row:
    goal = next((bound.ratio for bound in bounds if (bound.peer, bound.kind) == (peer, kind)), None)
    return Row(
        metric=_metric(kind),
        value=median(_ms(ours)),
        unit="ms",
        peer=peer,
        peer_value=median(_ms(theirs)),
        pair_ratio=ratio_of_pairs(_ms(ours), _ms(theirs)),
        goal=None if goal is None else Goal("<=", goal, of="ratio"),
    )


def not_compared(found: Firsts, ours: str, bounds: Sequence[Bound], reasons: dict[str, str]) -> Iterator[Row]:
    """A row for each goal whose peer is not there."""
    for bound in bounds:
        if bound.peer in reasons and bound.peer not in found:
            yield Row(
                metric=_metric(bound.kind),
                value=median(_ms(found[ours][bound.kind])),
                unit="ms",
                peer=bound.peer,
                goal=Goal("<=", bound.ratio, of="ratio"),
                note=f"not compared with {bound.peer}: {reasons[bound.peer]}",
            )


def _metric(kind: str) -> str:
    return f"first token of {PROMPT_TOKENS:,} tokens, {kind}"


def _ms(batches: list[Batch]) -> list[float]:
    return [1000 * batch.first_s[0] for batch in batches]
