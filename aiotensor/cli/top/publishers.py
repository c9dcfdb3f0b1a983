"""The report on the inspection of a publisher, as lines, JSON or a screen. Only the screen needs rich."""

import json
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from aiotensor.cli.words import brief, counted, in_words, of_limit, printable, short
from aiotensor.inspection import PublisherInspection
from aiotensor.types import SubscriberLag

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PublishingRate", "as_json", "as_lines", "as_screen", "rate"]

_SHOWN_OF_AN_ID = 6
_BESIDE_SUBSCRIBERS = 5  # lines of the screen besides the subscribers


class PublishingRate(NamedTuple):
    """The average rates of a publisher between two inspections."""

    bytes_per_s: float
    publications_per_s: float


def rate(before: PublisherInspection | None, now: PublisherInspection) -> PublishingRate | None:
    """Return the rates of a publisher; None without an earlier inspection of the same publisher."""
    if before is None or before.publisher != now.publisher or now.answered_at <= before.answered_at:
        return None
    seconds, then = now.answered_at - before.answered_at, before.statistics
    return PublishingRate(
        (now.statistics.bytes_published - then.bytes_published) / seconds,
        (now.statistics.published - then.published) / seconds,
    )


def as_json(address: str, before: PublisherInspection | None, now: PublisherInspection) -> str:
    """Format an inspection as one JSON object: the publisher, its `statistics`, and its rates (`published`).

    The rates are null if they are unknown.
    """
    found = msgspec.to_builtins(now)
    del found["answered_at"]  # the clock has no meaning in other processes
    rates = rate(before, now)
    found["published"] = None if rates is None else rates._asdict()
    return json.dumps({"address": address, **found}, indent=2, allow_nan=False)


def as_lines(address: str, now: PublisherInspection) -> str:
    """Format an inspection as lines: one for the publisher, and one for each subscriber, slowest first."""
    statistics = now.statistics
    waiting = "no call waits"
    if statistics.waiting:
        waiting = f"{statistics.waiting} waiting for up to {statistics.longest_wait_s:.1f} s"
    parts = [
        f"{of_limit(statistics.subscribers, statistics.max_subscribers)} subscribers",
        f"{in_words(statistics.bytes_in_use)} of {in_words(statistics.arena_bytes)} in use",
        waiting,
        f"{counted(statistics.published, 'publication')} ({in_words(statistics.bytes_published)})",
        f"{statistics.history} kept",
        f"{statistics.dropped} dropped",
        f"{statistics.subscribers_lost} lost",
        f"{statistics.subscribers_refused} refused",
    ]
    first = f"publisher pid {now.pid} at {printable(address)}: {', '.join(parts)}"
    return "\n".join([first, *(_line_of(lag, statistics.max_behind) for lag in statistics.lags)])


def _line_of(lag: SubscriberLag, max_behind: int) -> str:
    since = f" for {lag.behind_s:.1f} s" if lag.behind else ""
    return (
        f"subscriber pid {lag.pid} ({printable(lag.subscriber[:_SHOWN_OF_AN_ID])}): {lag.behind} of "
        f"{max_behind} behind{since}, {in_words(lag.held_bytes)} in use, {lag.delivered} delivered, "
        f"{lag.dropped} dropped"
    )


def as_screen(
    address: str, before: PublisherInspection | None, now: PublisherInspection, height: int
) -> "RenderableType":
    """Draw an inspection: the publisher, and a table of its subscribers, slowest first.

    Args:
        address: the address of the publisher.
        before: the previous inspection, for the rates; None if there is none.
        now: the inspection to draw.
        height: the height of the screen in lines; subscribers that do not fit are only counted.
    """
    from rich.console import Group
    from rich.text import Text

    from aiotensor.cli.top.columns import FittingTable

    statistics, rates = now.statistics, rate(before, now)
    title = Text("publisher ", style="bold", no_wrap=True, overflow="ellipsis")
    title.append(f"pid {now.pid}", style="bold cyan").append(f"  {printable(address)}", style="dim")
    facts = {
        "subscribers": of_limit(statistics.subscribers, statistics.max_subscribers, "/"),
        "memory": f"{short(statistics.bytes_in_use)}/{short(statistics.arena_bytes)}",
        "published/s": "-" if rates is None else brief(rates.publications_per_s),
        "bytes/s": "-" if rates is None else short(rates.bytes_per_s),
        "waiting": str(statistics.waiting),
        "dropped": str(statistics.dropped),
        "lost": str(statistics.subscribers_lost),
    }
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, value in facts.items():
        line.append(f"{name} ", style="dim").append(f"{value}   ")
    line.rstrip()
    if not statistics.lags:
        return Group(title, line, Text(), Text("no subscriber is connected", style="dim"))
    table = FittingTable(
        ["pid", "subscriber", "behind", "for", "memory", "delivered", "dropped"],
        texts=["subscriber"],
        dispensable=["subscriber", "delivered", "memory", "dropped", "for"],
    )
    space = max(1, height - _BESIDE_SUBSCRIBERS)
    shown = statistics.lags if len(statistics.lags) <= space else statistics.lags[: max(1, space - 1)]
    for lag in shown:
        is_full = lag.behind >= statistics.max_behind
        table.add_row(
            str(lag.pid),
            Text(printable(lag.subscriber[:_SHOWN_OF_AN_ID]), style="dim"),
            Text(f"{lag.behind}/{statistics.max_behind}", style="yellow" if is_full else ""),
            f"{brief(lag.behind_s)} s" if lag.behind else "-",
            short(lag.held_bytes),
            str(lag.delivered),
            Text(str(lag.dropped), style="yellow" if lag.dropped else ""),
        )
    more = statistics.subscribers - len(shown)
    rest = [Text(f"and {more} more", style="dim")] if more > 0 else []
    return Group(title, line, Text(), table, *rest)
