"""The byte budget: never over its limit, everybody gets a turn, and nobody waits for ever."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.budget import Budget
from mesh.errors import Overloaded


@given(st.lists(st.integers(1, 10), min_size=1, max_size=20))
def test_it_is_never_over_its_limit_and_everybody_gets_a_turn(sizes) -> None:
    async def run() -> int:
        budget, most = Budget(10, wait_s=30), 0

        async def use(size: int) -> None:
            nonlocal most
            async with budget.hold(size):
                most = max(most, budget.held)
                await asyncio.sleep(0)

        await asyncio.gather(*map(use, sizes))
        assert budget.held == 0
        return most

    assert asyncio.run(run()) <= 10


async def test_who_finds_no_room_in_time_is_refused_and_holds_nothing() -> None:
    budget = Budget(10, wait_s=0.01)
    async with budget.hold(6):
        with pytest.raises(Overloaded) as refused:
            async with budget.hold(5):
                pass
        assert refused.value.retry_after_s
        assert budget.held == 6
    assert budget.held == 0


async def test_who_is_cancelled_while_waiting_holds_nothing(eventually) -> None:
    budget = Budget(10, wait_s=30)
    async with budget.hold(10):
        waiting = asyncio.create_task(_hold_for_ever(budget))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert budget.held == 0


async def _hold_for_ever(budget: Budget) -> None:
    async with budget.hold(1):
        await asyncio.Event().wait()
