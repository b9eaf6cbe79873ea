"""Engines that take turns at the same work: the first must not fail, any other is left out once it does."""

from collections.abc import Sequence

from mesh.bench.contender import Batch, Contender
from mesh.bench.progress import Bar
from mesh.bench.report import CannotMeasure

# No engine here is so slow that a batch takes longer; a hung one ends the run.
BATCH_TIMEOUT_S = 1200.0


class Contest:
    """`missing` names those that are out and why; who is in it at the start was never in."""

    def __init__(self, contenders: Sequence[Contender], missing: dict[str, str], shown: Bar) -> None:
        self.contenders = contenders
        self.missing = missing
        self._shown = shown

    async def run(self, contender: Contender, prompts: Sequence[str], output_tokens: int, what: str) -> Batch | None:
        """One batch; None if the contender is out, or now fails. Raises CannotMeasure if the first one does."""
        self._shown.say(f"{what}, {contender.name}")
        self._shown.advance()
        if contender.name in self.missing:
            return None
        try:
            return await contender.run(prompts, output_tokens, BATCH_TIMEOUT_S)
        except CannotMeasure as reason:
            if contender is self.contenders[0]:
                raise
            self.missing[contender.name] = str(reason)
            return None
