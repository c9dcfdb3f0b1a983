"""Format an inspection of a receiver or a publisher for `aiotensor top`: lines, JSON, or a screen."""

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeAlias

import click
import msgspec

from aiotensor.cli.words import printable, short
from aiotensor.errors import PeerLostError
from aiotensor.inspection import Inspection, PublisherInspection

__all__ = ["Look", "as_json", "as_lines", "watch"]

# Terminal sequences: switch to the alternate screen without a cursor, clear it, and restore the main screen.
_BEGIN, _CLEAR, _END = "\x1b[?1049h\x1b[?25l", "\x1b[H\x1b[J", "\x1b[?25h\x1b[?1049l"

Seen: TypeAlias = Inspection | PublisherInspection
Look: TypeAlias = Callable[[], Coroutine[Any, Any, Seen]]  # inspects the receiver or publisher once


async def watch(address: str, look: Look, interval_s: float) -> NoReturn:
    """Inspect the receiver or publisher at an address, and its successors, until cancelled.

    Afterwards, the last result stays on the terminal. SIGTERM cancels this coroutine, so that the terminal is
    restored before the process ends.

    Args:
        address: the address of the receiver or publisher.
        look: a function that inspects it once.
        interval_s: the pause in seconds between two inspections.

    Raises:
        AioTensorError: this process cannot inspect the address, for a reason other than a missing process.
    """
    watching = asyncio.current_task()
    if watching is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, watching.cancel)
    before: Seen | None = None
    lines: list[str] = []
    click.echo(_BEGIN, nl=False)
    try:
        while True:
            try:
                now = await look()
            except PeerLostError as error:
                before, lines = None, [printable(str(error)), "waiting for the next one ..."]
            else:
                lines = as_lines(address, before, now, *shutil.get_terminal_size())
                before = now
            click.echo(_CLEAR + "\n".join(lines), nl=False)
            await asyncio.sleep(interval_s)
    finally:
        click.echo(_END + "\n".join(lines))


def as_json(address: str, before: Seen, now: Seen) -> str:
    """Format an inspection as one JSON object, with the rates since an earlier inspection.

    Rates are null if they are unknown, because another receiver, publisher or sender has connected since.
    """
    found = msgspec.to_builtins(now)
    del found["answered_at"]  # the clock has no meaning in other processes
    of_senders, rates = _rates(before, now, _messages), _rates(before, now, _totals)
    for sender in found.get("senders", ()):
        sender["messages_per_s"] = of_senders.get(sender["sender"])
    found["rates"] = {f"{name}_per_s": rates.get(name) for name in _totals(now)}
    return json.dumps({"address": address, **found}, indent=2, allow_nan=False)


def as_lines(
    address: str, before: Seen | None, now: Seen, width: int | None = None, height: int | None = None
) -> list[str]:
    """Format an inspection as lines: the receiver or publisher, and a row for each sender or subscriber.

    Args:
        address: the address of the receiver or publisher.
        before: the previous inspection, for the rates; None if there is none.
        now: the inspection to format.
        width: the number of columns after which lines are cut; None for no limit.
        height: the maximum number of lines, so that rows that do not fit are only counted; None for no limit.
    """
    if isinstance(now, Inspection):
        head, rows, count = _receiver(before, now)
    else:
        head, rows, count = _publisher(before, now)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.rjust, row, widths)) for row in rows] if count else []
    if height is not None and len(head) + len(table) > height:
        table = table[: max(2, height - len(head) - 1)]
    hidden = count - len(table[1:])
    title, *facts = head
    lines = [f"{title}  {printable(address)}", *facts, *table, *([f"and {hidden} more"] if hidden else [])]
    first, *others = (line[:width] for line in lines)
    return [click.style(first, bold=True), *others]


def _receiver(before: Seen | None, now: Inspection) -> tuple[list[str], list[list[str]], int]:
    """Return the lines about a receiver, a table of its senders, and the number of senders."""
    it, of_senders = now.statistics, _rates(before, now, _messages)
    head = [
        f"receiver pid {now.pid}",
        _facts(
            senders=_of(it.senders, it.max_senders),
            lost=it.senders_lost,
            refused=it.senders_refused,
            waiting=it.waiting,
            taken=_speed(_rates(before, now, _totals), "tensors"),
        ),
        _facts(
            mapped=_of(
                short(it.mapped_bytes), None if it.max_mapped_bytes is None else short(it.max_mapped_bytes)
            ),
            unclaimed=_with_bytes(it.unclaimed_tensors, it.unclaimed_bytes),
            leases=_with_bytes(it.leases, it.leased_bytes),
        ),
    ]
    rows = [["pid", "sender", "in flight", "messages", "per s", "unclaimed", "leases", "arena"]]
    rows += [
        [
            str(sender.pid),
            _brief(sender.sender),
            _of(sender.in_flight, sender.max_concurrent_videos),
            str(sender.messages),
            f"{of_senders[sender.sender]:.1f}" if sender.sender in of_senders else "-",
            _with_bytes(sender.unclaimed_tensors, sender.unclaimed_bytes),
            _with_bytes(sender.leases, sender.leased_bytes),
            short(sender.arena_bytes),
        ]
        for sender in now.senders
    ]
    return head, rows, len(now.senders)


def _publisher(before: Seen | None, now: PublisherInspection) -> tuple[list[str], list[list[str]], int]:
    """Return the lines about a publisher, a table of its subscribers, and the number of subscribers."""
    it = now.statistics
    head = [
        f"publisher pid {now.pid}",
        _facts(
            subscribers=_of(it.subscribers, it.max_subscribers),
            lost=it.subscribers_lost,
            refused=it.subscribers_refused,
            dropped=it.dropped,
            waiting=f"{it.waiting} ({it.longest_wait_s:.1f} s)" if it.waiting else 0,
        ),
        _facts(
            memory=_of(short(it.bytes_in_use), short(it.arena_bytes)),
            kept=it.history,
            publications=_with_bytes(it.published, it.bytes_published),
            published=_speed(_rates(before, now, _totals), "publications"),
        ),
    ]
    rows = [["pid", "subscriber", "behind", "for", "memory", "delivered", "dropped"]]
    rows += [
        [
            str(lag.pid),
            _brief(lag.subscriber),
            _of(lag.behind, it.max_behind),
            f"{lag.behind_s:.1f} s" if lag.behind else "-",
            short(lag.held_bytes),
            str(lag.delivered),
            str(lag.dropped),
        ]
        for lag in it.lags
    ]
    return head, rows, it.subscribers


def _rates(before: Seen | None, now: Seen, totals: Callable[[Seen], dict[str, int]]) -> dict[str, float]:
    """Return how fast totals have grown since an earlier inspection of the same receiver or publisher."""
    if before is None or _id(before) != _id(now) or before.answered_at >= now.answered_at:
        return {}
    seconds, earlier = now.answered_at - before.answered_at, totals(before)
    return {name: (total - earlier[name]) / seconds for name, total in totals(now).items() if name in earlier}


def _id(seen: Seen) -> str:
    return seen.receiver if isinstance(seen, Inspection) else seen.publisher


def _totals(seen: Seen) -> dict[str, int]:
    if isinstance(seen, Inspection):
        return {"tensors": seen.statistics.tensors_taken, "bytes": seen.statistics.bytes_taken}
    return {"publications": seen.statistics.published, "bytes": seen.statistics.bytes_published}


def _messages(seen: Seen) -> dict[str, int]:
    return {one.sender: one.messages for one in seen.senders} if isinstance(seen, Inspection) else {}


def _facts(**facts: object) -> str:
    return "   ".join(f"{name} {fact}" for name, fact in facts.items())


def _of(value: object, limit: object | None) -> str:
    return f"{value}" if limit is None else f"{value}/{limit}"


def _with_bytes(count: int, nbytes: int) -> str:
    return f"{count} ({short(nbytes)})" if count else "0"


def _speed(rates: dict[str, float], name: str) -> str:
    return f"{rates[name]:.1f}/s ({short(rates['bytes'])}/s)" if rates else "-"


def _brief(name: str) -> str:
    """Shorten the id of a sender or subscriber."""
    return printable(name[:6])
