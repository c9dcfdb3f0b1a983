"""The report on the inspection of a receiver: rates, holders, and the output as lines or JSON."""

import json
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

import msgspec

from aiotensor.cli.words import counted, in_words, of_limit, printable
from aiotensor.inspection import Inspection, PublisherInspection, SenderInspection
from aiotensor.types import Holder, SenderStatistics

__all__ = ["Held", "Look", "Rate", "as_json", "as_lines", "holders_of", "named", "rates"]

_SHOWN_OF_AN_ID = 6

# A function that inspects the receiver or publisher once.
Look: TypeAlias = Callable[[], Coroutine[Any, Any, Inspection | PublisherInspection]]


class Rate(NamedTuple):
    """The average rates of a sender between two inspections."""

    bytes_per_s: float
    messages_per_s: float


class Held(NamedTuple):
    """A holder of resources, with the process id of its sender and a description of its message."""

    pid: int
    message: str
    holder: Holder


def rates(before: Inspection | None, now: Inspection) -> dict[str, Rate]:
    """Return the rates of senders by their ids, without senders that did not reply to both inspections."""
    earlier = {} if before is None else {sender.sender: sender for sender in before.senders}
    found = {sender.sender: _rate(earlier.get(sender.sender), sender) for sender in now.senders}
    return {sender: rate for sender, rate in found.items() if rate is not None}


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


def holders_of(inspection: Inspection) -> list[Held]:
    """Return the holders of all senders, longest first."""
    found = [
        Held(sender.pid, _message(holder), holder)
        for sender in inspection.senders
        if sender.statistics is not None
        for holder in sender.statistics.holders
    ]
    return sorted(found, key=lambda held: -held.holder.seconds)


def _message(holder: Holder) -> str:
    return "no message yet" if holder.message is None else f"message {holder.message}"


def named(sender: str) -> str:
    """Shorten the id of a sender."""
    return printable(sender[:_SHOWN_OF_AN_ID])


def as_json(address: str, before: Inspection | None, now: Inspection) -> str:
    """Format an inspection as one JSON object: the receiver, its `statistics`, and its `senders` with theirs.

    The `statistics` of a sender that did not reply are null. The rates of a sender (`sent`) are null unless
    it replied to both inspections.
    """
    found = msgspec.to_builtins(now)
    by_sender = rates(before, now)
    for sender in found["senders"]:
        del sender["answered_at"]  # the clock has no meaning in other processes
        rate = by_sender.get(sender["sender"])
        sender["sent"] = None if rate is None else rate._asdict()
    return json.dumps({"address": address, **found}, indent=2, allow_nan=False)


def as_lines(address: str, now: Inspection) -> str:
    """Format an inspection as lines: one for the receiver, one for each sender, and one for each holder."""
    return "\n".join([_receiver(address, now), *map(_sender, now.senders), *map(_holder, holders_of(now))])


def _receiver(address: str, now: Inspection) -> str:
    statistics = now.statistics
    limit = statistics.max_mapped_bytes
    parts = [
        f"{of_limit(statistics.senders, statistics.max_senders)} senders",
        f"{of_limit(in_words(statistics.mapped_bytes), None if limit is None else in_words(limit))} mapped",
        f"{_tensors(statistics.unclaimed_tensors, statistics.unclaimed_bytes)} unclaimed",
        f"{counted(statistics.leases, 'lease')} ({in_words(statistics.leased_bytes)})",
        f"{statistics.senders_lost} lost",
        f"{statistics.senders_refused} refused",
    ]
    return f"receiver pid {now.pid} at {printable(address)}: {', '.join(parts)}"


def _sender(sender: SenderInspection) -> str:
    statistics = sender.statistics
    parts = ["does not answer"] if statistics is None else _usage(statistics)
    parts.append(f"{_tensors(sender.unclaimed_tensors, sender.unclaimed_bytes)} unclaimed")
    if sender.leases:
        parts.append(f"{counted(sender.leases, 'lease')} ({in_words(sender.leased_bytes)})")
    return f"sender pid {sender.pid} ({named(sender.sender)}): {', '.join(parts)}"


def _usage(statistics: SenderStatistics) -> list[str]:
    waiting = "no call waits"
    if statistics.waiting:
        waiting = f"{statistics.waiting} waiting for up to {statistics.longest_wait_s:.1f} s"
    return [
        f"{statistics.in_flight} of {statistics.max_concurrent_videos} permits",
        f"{in_words(statistics.bytes_in_use)} of {in_words(statistics.arena_bytes)} in use",
        waiting,
        f"{counted(statistics.messages_sent, 'message')} ({in_words(statistics.bytes_sent)}) sent",
    ]


def _holder(held: Held) -> str:
    holder = held.holder
    return (
        f"pid {held.pid} {held.message}, {printable(holder.state)}, {in_words(holder.bytes)}, "
        f"{holder.seconds:.1f} s"
    )


def _tensors(count: int, nbytes: int) -> str:
    return f"{counted(count, 'tensor')} ({in_words(nbytes)})"
