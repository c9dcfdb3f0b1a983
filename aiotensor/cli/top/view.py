"""Inspect a receiver or publisher repeatedly, and draw the results on a terminal. Needs rich."""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiotensor.cli.top import publishers
from aiotensor.cli.top.columns import FittingTable
from aiotensor.cli.top.report import Held, Look, Rate, holders_of, named, rates
from aiotensor.cli.words import brief, of_limit, printable, short
from aiotensor.errors import PeerLostError
from aiotensor.inspection import Inspection, PublisherInspection, SenderInspection

__all__ = ["as_screen", "missing", "watch"]

_LONG_WAIT_S = 1.0  # longer waits are drawn in red
_UNKNOWN = "-"
_BESIDE_SENDERS = 5  # lines of the screen above the senders
_OF_HOLDERS = 3  # lines besides the holders: a blank line, a title, and the number of omitted holders

_over = partial(of_limit, of="/")


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
    # By default, rich draws nothing if it detects no terminal, and this loop would run without an effect.
    console = Console(force_terminal=True)
    before: Inspection | PublisherInspection | None = None
    last: RenderableType = Text()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    now = await look()
                except PeerLostError as error:
                    before, last = None, missing(str(error))
                else:
                    last = _screen(address, before, now, console.height)
                    before = now
                live.update(last, refresh=True)
                await asyncio.sleep(interval_s)
    finally:
        console.print(last)  # the end of the live view has restored the earlier content of the terminal


def _screen(
    address: str,
    before: Inspection | PublisherInspection | None,
    now: Inspection | PublisherInspection,
    height: int,
) -> RenderableType:
    if isinstance(now, PublisherInspection):
        same = before if isinstance(before, PublisherInspection) else None
        return publishers.as_screen(address, same, now, height)
    return as_screen(address, before if isinstance(before, Inspection) else None, now, height)


def as_screen(address: str, before: Inspection | None, now: Inspection, height: int) -> RenderableType:
    """Draw an inspection: the receiver, a table of its senders, and a list of the holders, longest first.

    Args:
        address: the address of the receiver.
        before: the previous inspection, for the rates of senders; None if there is none.
        now: the inspection to draw.
        height: the height of the screen in lines; senders and holders that do not fit are only counted.
    """
    held = holders_of(now)
    room = height - _BESIDE_SENDERS
    for_senders = room - (_OF_HOLDERS + 1 if held else 0)
    senders = now.senders
    if len(senders) > for_senders:
        senders = senders[: max(1, for_senders - 1)]
    parts: list[RenderableType] = [_header(address, now), Text(), _senders(senders, rates(before, now))]
    parts += _more(len(now.senders) - len(senders))
    if held:
        for_holders = max(1, room - len(senders) - (len(senders) < len(now.senders)) - _OF_HOLDERS)
        parts += [Text(), Text("held for longest", style="bold"), _holders(held[:for_holders])]
        parts += _more(len(held) - for_holders)
    return Group(*parts)


def _more(count: int) -> list[Text]:
    return [Text(f"and {count} more", style="dim")] if count > 0 else []


def missing(reason: str) -> RenderableType:
    """Draw the reason why there is nothing to inspect."""
    return Group(Text(printable(reason), style="yellow"), Text("waiting for the next one ...", style="dim"))


def _header(address: str, now: Inspection) -> RenderableType:
    statistics = now.statistics
    title = _line("receiver ", style="bold")
    title.append(f"pid {now.pid}", style="bold cyan").append(f"  {printable(address)}", style="dim")
    limit = statistics.max_mapped_bytes
    of_senders = {
        "senders": _over(statistics.senders, statistics.max_senders),
        "lost": str(statistics.senders_lost),
        "refused": str(statistics.senders_refused),
    }
    of_memory = {
        "mapped": _over(short(statistics.mapped_bytes), None if limit is None else short(limit)),
        "unclaimed": _with_bytes(statistics.unclaimed_tensors, statistics.unclaimed_bytes),
        "leases": _with_bytes(statistics.leases, statistics.leased_bytes),
    }
    return Group(title, _facts(of_senders), _facts(of_memory))


def _line(text: str = "", style: str = "") -> Text:
    # A wrapped line would push other lines off the screen.
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _facts(facts: Mapping[str, str]) -> Text:
    line = _line()
    for name, value in facts.items():
        line.append(f"{name} ", style="dim").append(f"{value}   ")
    line.rstrip()
    return line


def _senders(senders: Sequence[SenderInspection], by_sender: Mapping[str, Rate]) -> RenderableType:
    if not senders:
        return Text("no sender is connected", style="dim")
    table = FittingTable(
        ["pid", "sender", "permits", "memory", "sent/s", "msgs/s", "wait", "longest", "unclaimed"],
        texts=["sender"],
        dispensable=["sender", "msgs/s", "unclaimed", "sent/s", "longest", "wait", "memory"],
    )
    for sender in senders:
        table.add_row(*_row(sender, by_sender.get(sender.sender)))
    return table


def _row(sender: SenderInspection, rate: Rate | None) -> list[Text]:
    statistics = sender.statistics
    ends = [Text(str(sender.pid)), Text(named(sender.sender), style="dim")]
    unclaimed = Text(_with_bytes(sender.unclaimed_tensors, sender.unclaimed_bytes))
    if statistics is None:
        limits = [f"?/{sender.max_concurrent_videos}", f"?/{short(sender.arena_bytes)}"]
        silent = [*limits, "silent", *[_UNKNOWN] * 3]
        return [*ends, *(Text(word, style="yellow") for word in silent), unclaimed]
    is_full = statistics.in_flight >= statistics.max_concurrent_videos
    is_long = statistics.waiting and statistics.longest_wait_s >= _LONG_WAIT_S
    return [
        *ends,
        Text(f"{statistics.in_flight}/{statistics.max_concurrent_videos}", style="yellow" if is_full else ""),
        Text(f"{short(statistics.bytes_in_use)}/{short(statistics.arena_bytes)}"),
        Text(_UNKNOWN if rate is None else short(rate.bytes_per_s)),
        Text(_UNKNOWN if rate is None else brief(rate.messages_per_s)),
        Text(str(statistics.waiting), style="yellow" if statistics.waiting else ""),
        Text(
            f"{brief(statistics.longest_wait_s)} s" if statistics.waiting else _UNKNOWN,
            style="bold red" if is_long else "",
        ),
        unclaimed,
    ]


def _holders(held: list[Held]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for one in held:
        holder = one.holder
        table.add_row(
            Text(f"pid {one.pid}"),
            Text(one.message),
            Text(printable(holder.state)),
            Text(short(holder.bytes)),
            Text(f"{brief(holder.seconds)} s"),
        )
    return table


def _with_bytes(count: int, nbytes: int) -> str:
    return f"{count} ({short(nbytes)})" if count else "0"
