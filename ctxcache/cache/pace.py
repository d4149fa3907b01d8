"""Pace: how a long piece of work lets others have their turn of the event loop. Knows nothing of the work."""

import asyncio
from typing import Protocol


class Pace(Protocol):
    """When it is time to rest."""

    @property
    def is_over(self) -> bool:
        """Whether others should have their turn now."""

    async def rest(self) -> None:
        """Let others have their turn."""


class StepByStep:
    """Rests whenever it is asked, for one turn of the loop: for work that nobody waits for."""

    is_over = True

    async def rest(self) -> None:
        """See Pace."""
        await asyncio.sleep(0)


STEP_BY_STEP = StepByStep()
