"""The supervisor of `shoal up --detach`: `python -m mesh.cli.daemon PLAN [LOCK]`, PLAN being a MeshPlan as JSON.

LOCK is the descriptor of the lock (mesh/cli/claim.py) that whoever starts us has taken; without it we take it.
"""

import asyncio
import sys

import msgspec

from mesh.cli import claim
from mesh.cli.plan import MeshPlan
from mesh.cli.ports import PlanError
from mesh.cli.problem import Problem
from mesh.cli.process import StartFailed
from mesh.cli.record import record
from mesh.cli.supervisor import Supervisor
from mesh.server import run


def main() -> None:
    """Run the planned mesh until SIGTERM. Exit code 1 with the reason on stderr if it does not come up."""
    if len(sys.argv) < 3:
        _take_lock()
    record()
    plan = msgspec.json.decode(sys.argv[1], type=MeshPlan)

    async def supervise(stopping: asyncio.Event) -> None:
        await Supervisor(plan).run(stopping)

    try:
        run(supervise)
    except (StartFailed, PlanError) as error:
        raise SystemExit(str(error)) from None


def _take_lock() -> None:
    try:
        claim.take()
    except Problem as problem:
        raise SystemExit(str(problem)) from None


if __name__ == "__main__":
    main()
