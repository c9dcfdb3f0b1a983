"""What a look found: lines for people, JSON for machines."""

import json

import msgspec

from aiotensor.cli.doctor.finding import in_words
from aiotensor.cli.top.rates import rates
from aiotensor.cli.top.words import Held, counted, holders_of, named, of_limit, printable
from aiotensor.inspection import Inspection, SenderInspection
from aiotensor.types import SenderStatistics

__all__ = ["as_json", "as_lines"]


def as_json(address: str, before: Inspection | None, now: Inspection) -> str:
    """Write one object: the receiver, its `statistics`, and its `senders`, each with its own.

    The `statistics` of a sender that did not answer are null, and so is what it `sent` in a second, unless it
    answered both times.
    """
    found = msgspec.to_builtins(now)
    by_sender = rates(before, now)
    for sender in found["senders"]:
        del sender["answered_at"]  # by a clock that nobody else has
        rate = by_sender.get(sender["sender"])
        sender["sent"] = None if rate is None else rate._asdict()
    return json.dumps({"address": address, **found}, indent=2, allow_nan=False)


def as_lines(address: str, now: Inspection) -> str:
    """Write a line for the receiver, one for each sender, and one for each of their holders."""
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
    parts = ["does not answer"] if statistics is None else _of_its_own(statistics)
    parts.append(f"{_tensors(sender.unclaimed_tensors, sender.unclaimed_bytes)} unclaimed")
    if sender.leases:
        parts.append(f"{counted(sender.leases, 'lease')} ({in_words(sender.leased_bytes)})")
    return f"sender pid {sender.pid} ({named(sender.sender)}): {', '.join(parts)}"


def _of_its_own(statistics: SenderStatistics) -> list[str]:
    waiting = "nobody waits"
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
        f"pid {held.pid} {held.what}, {printable(holder.state)}, {in_words(holder.bytes)}, "
        f"{holder.seconds:.1f} s"
    )


def _tensors(count: int, nbytes: int) -> str:
    return f"{counted(count, 'tensor')} ({in_words(nbytes)})"
