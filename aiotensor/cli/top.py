"""Format an inspection for `aiotensor top`: lines, JSON, or a screen."""

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
from aiotensor.inspection import Inspection
from aiotensor.types import PublisherStatistics, ReceiverStatistics, ServerStatistics

# Terminal sequences: switch to the alternate screen without a cursor, clear it, and restore the main screen.
_BEGIN, _CLEAR, _END = "\x1b[?1049h\x1b[?25l", "\x1b[H\x1b[J", "\x1b[?25h\x1b[?1049l"

Look: TypeAlias = Callable[[], Coroutine[Any, Any, Inspection]]  # inspects the process once
Row: TypeAlias = tuple[object, ...]
Shown: TypeAlias = tuple[list[str], list[Row], int]  # lines, rows about peers, and the number of peers
Rates: TypeAlias = dict[str, float]


async def watch(address: str, look: Look, interval_s: float) -> NoReturn:
    """Inspect the process at an address, and its successors, until cancelled.

    Afterwards, the last result stays on the terminal. SIGTERM cancels this coroutine, so that the terminal is
    restored before the process ends.

    Args:
        address: the address.
        look: a function that inspects the process once.
        interval_s: the pause in seconds between two inspections.

    Raises:
        AioTensorError: this process cannot inspect the address, for a reason other than a missing process.
    """
    watching = asyncio.current_task()
    if watching is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, watching.cancel)
    before: Inspection | None = None
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


def as_json(address: str, before: Inspection, now: Inspection) -> str:
    """Format an inspection as one JSON object, with the rates since an earlier inspection.

    Rates are null if they are unknown, because another process listens now, or another sender has connected.
    """
    found = msgspec.to_builtins(now)
    del found["answered_at"]  # the clock has no meaning in other processes
    of_senders, rates = _rates(before, now, _messages), _rates(before, now, _totals)
    for sender in found["senders"]:
        sender["messages_per_s"] = of_senders.get(sender["sender"])
    found["rates"] = {f"{name}_per_s": rates.get(name) for name in _totals(now)}
    return json.dumps({"address": address, **found}, indent=2, allow_nan=False)


def as_lines(
    address: str,
    before: Inspection | None,
    now: Inspection,
    width: int | None = None,
    height: int | None = None,
) -> list[str]:
    """Format an inspection as lines: the process, and a row for each sender or subscriber.

    Args:
        address: the address.
        before: the previous inspection, for the rates; None if there is none.
        now: the inspection to format.
        width: the number of columns after which lines are cut; None for no limit.
        height: the maximum number of lines, so that rows that do not fit are only counted; None for no limit.
    """
    rates = _rates(before, now, _totals)
    if isinstance(now.statistics, ReceiverStatistics):
        facts, rows, count = _receiver(now.statistics, rates, now, _rates(before, now, _messages))
    elif isinstance(now.statistics, PublisherStatistics):
        facts, rows, count = _publisher(now.statistics, rates)
    else:
        facts, rows, count = _server(now.statistics, rates)
    cells = [tuple(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(map(str.rjust, row, widths)) for row in cells] if count else []
    if height is not None and len(facts) + 1 + len(table) > height:
        table = table[: max(2, height - len(facts) - 2)]
    hidden = count - len(table[1:])
    title = f"{now.kind} pid {now.pid}  {printable(address)}"
    lines = [title, *facts, *table, *([f"and {hidden} more"] if hidden else [])]
    first, *others = (line[:width] for line in lines)
    return [click.style(first, bold=True), *others]


def _receiver(it: ReceiverStatistics, rates: Rates, now: Inspection, of_senders: Rates) -> Shown:
    facts = [
        f"senders {_of(it.senders, it.max_senders)}   lost {it.senders_lost}   refused {it.senders_refused}"
        f"   waiting {it.waiting}   taken {_speed(rates, 'tensors')}",
        f"mapped {_of_bytes(it.mapped_bytes, it.max_mapped_bytes)}   "
        f"unclaimed {_with_bytes(it.unclaimed_tensors, it.unclaimed_bytes)}   "
        f"leases {_with_bytes(it.leases, it.leased_bytes)}",
    ]
    rows: list[Row] = [("pid", "sender", "in flight", "messages", "per s", "unclaimed", "leases", "arena")]
    for one in now.senders:
        in_flight = _of(one.in_flight, one.max_concurrent_videos)
        rate = f"{of_senders[one.sender]:.1f}" if one.sender in of_senders else "-"
        unclaimed = _with_bytes(one.unclaimed_tensors, one.unclaimed_bytes)
        leases, arena = _with_bytes(one.leases, one.leased_bytes), short(one.arena_bytes)
        rows.append((one.pid, _brief(one.sender), in_flight, one.messages, rate, unclaimed, leases, arena))
    return facts, rows, len(now.senders)


def _server(it: ServerStatistics, rates: Rates) -> Shown:
    facts = [
        f"clients {_of(it.clients, it.max_clients)}   lost {it.clients_lost}   refused {it.clients_refused}"
        f"   waiting {it.waiting}   taken {_speed(rates, 'messages')}",
        f"mapped {_of_bytes(it.mapped_bytes, it.max_mapped_bytes)}   leases {it.leases}   "
        f"memory {_of_bytes(it.bytes_in_use, it.arena_bytes)}   answers {it.answers}   "
        f"failures {it.failures}   cancelled {it.cancelled}",
    ]
    return facts, [], 0


def _publisher(it: PublisherStatistics, rates: Rates) -> Shown:
    waiting = f"{it.waiting} ({it.longest_wait_s:.1f} s)" if it.waiting else "0"
    facts = [
        f"subscribers {_of(it.subscribers, it.max_subscribers)}   lost {it.subscribers_lost}   "
        f"refused {it.subscribers_refused}   dropped {it.dropped}   waiting {waiting}",
        f"memory {_of_bytes(it.bytes_in_use, it.arena_bytes)}   kept {it.history}   "
        f"publications {_with_bytes(it.published, it.bytes_published)}   "
        f"published {_speed(rates, 'publications')}",
    ]
    rows: list[Row] = [("pid", "subscriber", "behind", "for", "memory", "delivered", "dropped")]
    for lag in it.lags:
        behind, since = _of(lag.behind, it.max_behind), f"{lag.behind_s:.1f} s" if lag.behind else "-"
        memory = short(lag.held_bytes)
        rows.append((lag.pid, _brief(lag.subscriber), behind, since, memory, lag.delivered, lag.dropped))
    return facts, rows, it.subscribers


def _rates(
    before: Inspection | None, now: Inspection, totals: Callable[[Inspection], dict[str, int]]
) -> Rates:
    """Return how fast totals have grown since an earlier inspection of the same object."""
    if before is None or before.id != now.id or before.answered_at >= now.answered_at:
        return {}
    seconds, earlier = now.answered_at - before.answered_at, totals(before)
    return {name: (total - earlier[name]) / seconds for name, total in totals(now).items() if name in earlier}


def _totals(seen: Inspection) -> dict[str, int]:
    match seen.statistics:
        case ReceiverStatistics() as it:
            return {"tensors": it.tensors_taken, "bytes": it.bytes_taken}
        case PublisherStatistics() as it:
            return {"publications": it.published, "bytes": it.bytes_published}
        case ServerStatistics() as it:
            return {"messages": it.messages_taken, "answers": it.answers}


def _messages(seen: Inspection) -> dict[str, int]:
    return {one.sender: one.messages for one in seen.senders}


def _of(value: object, limit: object | None) -> str:
    return f"{value}" if limit is None else f"{value}/{limit}"


def _of_bytes(value: int, limit: int | None) -> str:
    return _of(short(value), None if limit is None else short(limit))


def _with_bytes(count: int, nbytes: int) -> str:
    return f"{count} ({short(nbytes)})" if count else "0"


def _speed(rates: dict[str, float], name: str) -> str:
    nbytes = f" ({short(rates['bytes'])}/s)" if "bytes" in rates else ""
    return f"{rates[name]:.1f}/s{nbytes}" if rates else "-"


def _brief(name: str) -> str:
    """Shorten the id of a sender or subscriber."""
    return printable(name[:6])
