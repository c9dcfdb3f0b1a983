"""What the demo shows: a progress bar, a table, and one line of JSON for programs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich import box
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from aiotensor import SenderStatistics
from aiotensor.cli.demo.messages import VideoAnswer
from aiotensor.cli.demo.uploads import Outcome, Upload

__all__ = ["Summary", "progress_bar", "results", "summarise", "verdict"]

CUTS_SHOWN = 12


class Summary(msgspec.Struct, frozen=True):
    """The last line of standard output.

    Attributes:
        videos: uploads that were answered, and arrived as they were sent.
        frames: decoded frames of those.
        bytes: bytes of their tensors.
        refused: uploads refused because of the file.
        failed: uploads that the server or the engine could not answer.
        lost: uploads that were sent and never answered.
        mismatched: uploads that arrived at the engine with other bytes, shapes or dtypes.
        peak_in_flight: the most videos that the sender had in flight at once, as it counted them.
        max_concurrent_videos: how many it may have.
        seconds: from the first upload to the last answer.
    """

    videos: int
    frames: int
    bytes: int
    refused: int
    failed: int
    lost: int
    mismatched: int
    peak_in_flight: int
    max_concurrent_videos: int
    seconds: float


def summarise(uploads: Sequence[Upload], statistics: SenderStatistics, seconds: float) -> Summary:
    """Count what happened."""
    outcomes = [upload.outcome for upload in uploads]
    answers = [upload.answer for upload in uploads if upload.answer and upload.outcome is Outcome.ANSWERED]
    return Summary(
        videos=len(answers),
        frames=sum(_frames(answer) for answer in answers),
        bytes=sum(answer.bytes for answer in answers),
        refused=outcomes.count(Outcome.REFUSED),
        failed=outcomes.count(Outcome.FAILED),
        lost=outcomes.count(Outcome.LOST),
        mismatched=outcomes.count(Outcome.MISMATCHED),
        peak_in_flight=statistics.peak_in_flight,
        max_concurrent_videos=statistics.max_concurrent_videos,
        seconds=round(seconds, 3),
    )


def progress_bar(console: Console) -> Progress:
    """Make the bar that is shown while uploads run; it leaves nothing behind."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def results(uploads: Sequence[Upload]) -> list[RenderableType]:
    """Draw one row for each clip, and one line for each clip with cuts and for each that went wrong."""
    by_clip: dict[Path, list[Upload]] = {}
    for upload in uploads:
        by_clip.setdefault(upload.clip, []).append(upload)
    table = _empty_table()
    cuts, problems = [], []
    for clip, group in sorted(by_clip.items()):
        answers = [upload.answer for upload in group if upload.answer]
        if answers:
            table.add_row(clip.name, str(len(answers)), *_measurements(answers))
            cuts += [_cuts(clip, answers[0])] if answers[0].cuts else []
        reasons = dict.fromkeys((upload.outcome, upload.reason) for upload in group if upload.reason)
        problems += [
            Text.assemble((outcome, "bold red"), f" {clip}: {reason}") for outcome, reason in reasons
        ]
    return [*([table] if table.row_count else []), *cuts, *problems]


def verdict(summary: Summary, *, good: bool) -> Text:
    """Say in one sentence how it went."""
    bad = [name for name in ("refused", "failed", "lost", "mismatched") if getattr(summary, name)]
    what = ", ".join(f"{getattr(summary, name)} {name}" for name in bad) or "none lost, none mismatched"
    return Text.assemble(
        f"{summary.videos} videos, {summary.bytes / 1e9:.2f} GB of tensors in {summary.seconds:.1f} s, "
        f"at most {summary.peak_in_flight} of {summary.max_concurrent_videos} in flight: ",
        (what, "bold red" if not good else "bold yellow" if bad else "bold green"),
    )


def _empty_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    # Only names give way: the table fits into 80 columns, also because of the headings of two lines.
    table.add_column("clip", vertical="bottom", overflow="fold")
    for heading in ("up-\nloads", "frames", "size", "MB", "decode\nms", "transport\nms", "cuts\nfound"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    return table


def _measurements(answers: Sequence[VideoAnswer]) -> list[str]:
    frames, height, width, _ = answers[0].sent[1].shape
    return [
        str(frames),
        f"{width}x{height}",
        f"{answers[0].bytes / 1e6:.1f}",
        f"{1000 * median(answer.decode_seconds for answer in answers):.1f}",
        f"{1000 * median(answer.transport_seconds for answer in answers):.1f}",
        str(len(answers[0].cuts)),
    ]


def _cuts(clip: Path, answer: VideoAnswer) -> Text:
    shown = ", ".join(f"{cut.frame} ({cut.seconds:.2f} s)" for cut in answer.cuts[:CUTS_SHOWN])
    more = len(answer.cuts) - CUTS_SHOWN
    return Text(f"cuts in {clip.name} at frame {shown}" + (f" and {more} more" if more > 0 else ""))


def _frames(answer: VideoAnswer) -> int:
    return answer.sent[1].shape[0]
