"""Tells the truth about the engine: to grpc.health.v1, to schedulers, to the log and, when it hangs, by an exit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpu_worker.bridge import Bridge

# Often enough that no peer hears a lie for longer than a step.
LOOK_S = 0.1

log = logging.getLogger("shoal.health")


@dataclass(frozen=True, slots=True)
class Watch:
    """Looks at the engine's pulse. `tell` hears of every change between well and not well."""

    bridge: Bridge
    tell: Callable[[bool], Awaitable[None]]
    hang_exit_s: float

    async def run(self) -> None:
        """Until cancelled, from when the engine has made a real token. Gives a hung engine up."""
        told = False
        while True:
            overdue_s = self.bridge.pulse.overdue_for(time.monotonic())
            well = self.bridge.well()
            if well != told:
                if not well:
                    log.warning("a step is overdue: not ready")
                await self.tell(well)
                told = well
            if overdue_s > self.hang_exit_s:
                self.bridge.give_up(f"no step for {self.hang_exit_s:g} s after it was overdue")
            await asyncio.sleep(LOOK_S)
