"""The output of the demo: a progress bar, a table, and one line of JSON for programs."""

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

from demo.messages import VideoAnswer, WorkerReport
from demo.uploads import Outcome, Upload

__all__ = ["Summary", "WorkerSummary", "progress_bar", "results", "summarise", "verdict"]

CUTS_SHOWN = 12


class WorkerSummary(msgspec.Struct, frozen=True):
    """The counts of one worker of the API server.

    Attributes:
        pid: its process id.
        videos: the number of videos that the engine answered.
        videos_in_place: the number of videos whose frames were decoded directly into shared memory.
        bytes_in_place: the size of these frames, which were not copied.
        peak_in_flight: the maximum number of videos that were in flight at once.
        peak_shared_bytes: the maximum amount of shared memory that was in use at once.
        shared_bytes_limit: the amount of shared memory that it may use.
    """

    pid: int
    videos: int
    videos_in_place: int
    bytes_in_place: int
    peak_in_flight: int
    peak_shared_bytes: int
    shared_bytes_limit: int


class Summary(msgspec.Struct, frozen=True):
    """The counts of a run, which are the last line of standard output.

    Attributes:
        videos: the number of uploads that were answered, and whose tensors arrived unchanged.
        frames: the number of their decoded frames.
        bytes: the size of their tensors.
        refused: the number of uploads that were refused because of the file.
        failed: the number of uploads that the server or the engine could not answer.
        lost: the number of uploads without an answer.
        mismatched: the number of uploads whose tensors differed in the engine.
        peak_in_flight: the maximum number of videos that a single worker had in flight at once.
        max_concurrent_videos: the limit of `peak_in_flight`.
        seconds: the time from the first upload to the last answer.
        link: the link between the workers and the engine.
        workers: the counts of each worker.
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
    link: str
    workers: list[WorkerSummary]


def summarise(
    uploads: Sequence[Upload], reports: Sequence[WorkerReport], seconds: float, *, link: str
) -> Summary:
    """Count the outcomes of a run."""
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
        peak_in_flight=max(report.client.peak_in_flight for report in reports),
        max_concurrent_videos=max(report.client.max_concurrent_videos for report in reports),
        seconds=round(seconds, 3),
        link=link,
        workers=[_worker(report) for report in reports],
    )


def progress_bar(console: Console) -> Progress:
    """Return a progress bar, which is erased at its end."""
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
    """Return a table with a row for each clip, and lines for its cuts and its errors."""
    by_clip: dict[Path, list[Upload]] = {}
    for upload in uploads:
        by_clip.setdefault(upload.clip, []).append(upload)
    table = _empty_table()
    cuts, problems = [], []
    for clip, group in sorted(by_clip.items()):
        answers = [upload.answer for upload in group if upload.answer]
        if answers:
            table.add_row(clip.name, str(len(answers)), *_measurements(answers))
            cuts.append(_cuts(clip, answers[0]))
        reasons = dict.fromkeys((upload.outcome, upload.reason) for upload in group if upload.reason)
        problems += [
            Text.assemble((outcome, "bold red"), f" {clip}: {reason}") for outcome, reason in reasons
        ]
    return [*([table] if table.row_count else []), *cuts, *problems]


def verdict(summary: Summary, *, good: bool) -> list[Text]:
    """Return a line for each worker, and a summary of the run."""
    bad = [name for name in ("refused", "failed", "lost", "mismatched") if getattr(summary, name)]
    what = ", ".join(f"{getattr(summary, name)} {name}" for name in bad) or "none lost, none mismatched"
    count = len(summary.workers)
    workers = [
        Text(
            f"worker {worker.pid}: {worker.videos} videos, "
            f"at most {worker.peak_in_flight} of {summary.max_concurrent_videos} in flight "
            f"and {worker.peak_shared_bytes / 1e6:.0f} of {worker.shared_bytes_limit / 1e6:.0f} MB shared; "
            f"{worker.videos_in_place} decoded in place, {worker.bytes_in_place / 1e9:.2f} GB not copied"
        )
        for worker in summary.workers
    ]
    sentence = Text.assemble(
        f"{summary.videos} videos, {summary.frames} frames, {summary.bytes / 1e9:.2f} GB of tensors in "
        f"{summary.seconds:.1f} s, link {summary.link}, {count} worker{'s' * (count > 1)}: ",
        (what, "bold red" if not good else "bold yellow" if bad else "bold green"),
    )
    return [*workers, sentence]


def _worker(report: WorkerReport) -> WorkerSummary:
    return WorkerSummary(
        pid=report.pid,
        videos=report.videos,
        videos_in_place=report.videos_in_place,
        bytes_in_place=report.bytes_in_place,
        peak_in_flight=report.client.peak_in_flight,
        peak_shared_bytes=report.client.peak_bytes_in_use,
        shared_bytes_limit=report.client.arena_bytes,
    )


def _empty_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    # Only the names are folded. With headings of two lines the table fits into 80 columns.
    table.add_column("clip", vertical="bottom", overflow="fold")
    headings = ("up-\nloads", "frames", "size", "MB", "decode\nms", "memory\nms", "trans-\nport ms")
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    return table


def _measurements(answers: Sequence[VideoAnswer]) -> list[str]:
    frames, height, width, _ = answers[0].sent[1].shape
    return [
        str(frames),
        f"{width}x{height}",
        f"{answers[0].bytes / 1e6:.1f}",
        f"{1000 * median(answer.decode_seconds for answer in answers):.1f}",
        f"{1000 * median(answer.memory_seconds for answer in answers):.1f}",
        f"{1000 * median(answer.transport_seconds for answer in answers):.1f}",
    ]


def _cuts(clip: Path, answer: VideoAnswer) -> Text:
    if not answer.cuts:
        return Text(f"no cuts in {clip.name}")
    shown = ", ".join(f"{cut.frame} ({cut.seconds:.2f} s)" for cut in answer.cuts[:CUTS_SHOWN])
    more = len(answer.cuts) - CUTS_SHOWN
    return Text(f"cuts in {clip.name} at frame {shown}" + (f" and {more} more" if more > 0 else ""))


def _frames(answer: VideoAnswer) -> int:
    return answer.sent[1].shape[0]
