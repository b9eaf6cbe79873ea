"""Shows how far loading is: a bar on a terminal, a log line every tenth elsewhere."""

import logging
import sys

_WIDTH = 30
_STEPS = 10

log = logging.getLogger("shoal.loading")


class LoadingLine:
    """Call `show` as often as you like, and `end` before anything else is written."""

    def __init__(self, terminal: bool | None = None) -> None:
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._tenth = -1
        self._open = False  # whether the terminal's line has no end yet

    def show(self, fraction: float, what: str) -> None:
        """`fraction` (0 to 1) is done and `what` is being done now."""
        if self._terminal:
            done = round(fraction * _WIDTH)
            end = "\n" if fraction >= 1 else ""
            self._open = not end
            sys.stderr.write(f"\r\x1b[K{'█' * done}{'░' * (_WIDTH - done)} {fraction:4.0%} {what}{end}")
            sys.stderr.flush()
        tenth = int(fraction * _STEPS + 1e-9)
        if tenth > self._tenth and not self._terminal:
            log.info(
                "loading: %d %%, %s", tenth * 10, what, extra={"fields": {"event": "loading", "percent": tenth * 10}}
            )
        self._tenth = max(tenth, self._tenth)

    def end(self) -> None:
        """End a line that is not full: loading was given up."""
        if self._open:
            self._open = False
            sys.stderr.write("\n")
