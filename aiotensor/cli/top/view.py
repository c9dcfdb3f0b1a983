"""The same on a terminal. Needs rich, as `watch.py` does."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aiotensor.cli.top.rates import Rate
from aiotensor.cli.top.words import Held, brief, holders_of, named, printable, short
from aiotensor.inspection import Inspection, SenderInspection

__all__ = ["as_screen", "nobody"]

_LONG_WAIT_S = 1.0  # worth a colour
_UNKNOWN = "-"
_BESIDE_SENDERS = 5  # lines of the screen above them
_OF_HOLDERS = 3  # lines that holders need beside their own


def as_screen(address: str, now: Inspection, rates: Mapping[str, Rate], height: int) -> RenderableType:
    """Draw a look: the receiver, a table of its senders, and who has held something for longest.

    Args:
        address: where the receiver listens.
        now: what was found.
        rates: how fast senders send, of those where that is known.
        height: lines of the screen; senders and holders for whom there is no room are counted.
    """
    held = holders_of(now)
    room = height - _BESIDE_SENDERS
    for_senders = room - (_OF_HOLDERS + 1 if held else 0)
    senders = now.senders
    if len(senders) > for_senders:
        senders = senders[: max(1, for_senders - 1)]
    parts: list[RenderableType] = [_header(address, now), Text(), _senders(senders, rates)]
    parts += _more(len(now.senders) - len(senders))
    if held:
        for_holders = max(1, room - len(senders) - (len(senders) < len(now.senders)) - _OF_HOLDERS)
        parts += [Text(), Text("held for longest", style="bold"), _holders(held[:for_holders])]
        parts += _more(len(held) - for_holders)
    return Group(*parts)


def _more(count: int) -> list[Text]:
    return [Text(f"and {count} more", style="dim")] if count > 0 else []


def nobody(reason: str) -> RenderableType:
    """Say why there is nothing to see, and that it is looked for."""
    return Group(Text(printable(reason), style="yellow"), Text("looking for the next one ...", style="dim"))


def _header(address: str, now: Inspection) -> RenderableType:
    statistics = now.statistics
    title = _line("receiver ", style="bold")
    title.append(f"pid {now.pid}", style="bold cyan").append(f"  {printable(address)}", style="dim")
    limit = statistics.max_mapped_bytes
    of_senders = {
        "senders": _of(statistics.senders, statistics.max_senders),
        "lost": str(statistics.senders_lost),
        "refused": str(statistics.senders_refused),
    }
    of_memory = {
        "mapped": _of(short(statistics.mapped_bytes), None if limit is None else short(limit)),
        "unclaimed": _with_bytes(statistics.unclaimed_tensors, statistics.unclaimed_bytes),
        "leases": _with_bytes(statistics.leases, statistics.leased_bytes),
    }
    return Group(title, _facts(of_senders), _facts(of_memory))


def _line(text: str = "", style: str = "") -> Text:
    # One that broke into two would push others off the screen.
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _facts(facts: Mapping[str, str]) -> Text:
    line = _line()
    for name, value in facts.items():
        line.append(f"{name} ", style="dim").append(f"{value}   ")
    line.rstrip()
    return line


def _senders(senders: Sequence[SenderInspection], rates: Mapping[str, Rate]) -> RenderableType:
    if not senders:
        return Text("no sender is connected", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("sender", no_wrap=True)
    for name in ("permits", "memory", "sent/s", "msgs/s", "wait", "longest", "unclaimed"):
        table.add_column(name, justify="right", no_wrap=True)
    for sender in senders:
        table.add_row(*_row(sender, rates.get(sender.sender)))
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
            Text(one.what),
            Text(printable(holder.state)),
            Text(short(holder.bytes)),
            Text(f"{brief(holder.seconds)} s"),
        )
    return table


def _of(value: object, limit: object | None) -> str:
    return f"{value}" if limit is None else f"{value}/{limit}"


def _with_bytes(count: int, nbytes: int) -> str:
    return f"{count} ({short(nbytes)})" if count else "0"
