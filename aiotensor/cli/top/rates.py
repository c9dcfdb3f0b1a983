"""How fast a sender sends, from two looks at it."""

import asyncio
from typing import NamedTuple

from aiotensor.inspection import Inspection, SenderInspection, inspect

__all__ = ["Rate", "inspect_twice", "rates"]


class Rate(NamedTuple):
    """What a sender sent in a second, on average between two looks."""

    bytes_per_s: float
    messages_per_s: float


def rates(before: Inspection | None, now: Inspection) -> dict[str, Rate]:
    """Say how fast each sender sends, by its id; one that did not answer twice is left out."""
    earlier = {} if before is None else {sender.sender: sender for sender in before.senders}
    found = {sender.sender: _rate(earlier.get(sender.sender), sender) for sender in now.senders}
    return {sender: rate for sender, rate in found.items() if rate is not None}


async def inspect_twice(address: str, interval_s: float, patience_s: float) -> tuple[Inspection, Inspection]:
    """Look at a receiver, and again after a pause. Errors are those of `inspect`."""
    before = await inspect(address, patience_s=patience_s)
    await asyncio.sleep(interval_s)
    return before, await inspect(address, patience_s=patience_s)


def _rate(before: SenderInspection | None, now: SenderInspection) -> Rate | None:
    if before is None or before.statistics is None or before.answered_at is None:
        return None
    if now.statistics is None or now.answered_at is None or now.answered_at <= before.answered_at:
        return None
    seconds = now.answered_at - before.answered_at
    return Rate(
        (now.statistics.bytes_sent - before.statistics.bytes_sent) / seconds,
        (now.statistics.messages_sent - before.statistics.messages_sent) / seconds,
    )
