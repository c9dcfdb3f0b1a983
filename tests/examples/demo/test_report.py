import io
from pathlib import Path

import pytest
from rich.console import Console

from aiotensor import SenderStatistics, Waits
from demo.messages import Cut, Fingerprint, VideoAnswer, WorkerReport
from demo.report import results, summarise, verdict
from demo.uploads import Outcome, Upload

SENT = (Fingerprint("float64", (50,), 1), Fingerprint("uint8", (50, 48, 64, 3), 2))


def report(pid: int, *, peak_in_flight: int = 2, videos: int = 4) -> WorkerReport:
    statistics = SenderStatistics(
        max_concurrent_videos=3,
        in_flight=0,
        peak_in_flight=peak_in_flight,
        waiting=0,
        longest_wait_s=0.0,
        holders=(),
        arena_bytes=1_000_000_000,
        bytes_in_use=0,
        peak_bytes_in_use=700_000_000,
        warm_bytes=0,
        largest_free_bytes=1_000_000_000,
        messages_sent=videos,
        messages_discarded=0,
        tensors_sent=2 * videos,
        bytes_sent=videos * 1000,
        receivers_lost=0,
        permit_waits=Waits((1.0,), (0, 0), 0.0),
        memory_waits=Waits((1.0,), (0, 0), 0.0),
        tensors_copied=0,
        bytes_copied=0,
        errors={},
    )
    return WorkerReport(pid, videos, videos - 1, 1_500_000_000, statistics)


def answered(name: str, *, transport_seconds: float = 0.002, cuts: int = 0) -> Upload:
    found = [Cut(frame=5 * index, seconds=index / 5, distance=0.5) for index in range(1, cuts + 1)]
    answer = VideoAnswer(
        name, 7, 1000, 0.25, 0.004, transport_seconds, 0.1, sent=SENT, received=SENT, cuts=found
    )
    return Upload(Path(name), Outcome.ANSWERED, answer)


def drawn(*uploads: Upload) -> str:
    console = Console(width=80, file=io.StringIO())
    for part in results(uploads):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_only_videos_that_arrived_unchanged_are_counted_as_videos() -> None:
    uploads = [
        answered("a.mp4"),
        answered("a.mp4"),
        Upload(Path("b.mp4"), Outcome.MISMATCHED, answered("b.mp4").answer, "changed"),
        Upload(Path("c.mp4"), Outcome.LOST, reason="no answer"),
        Upload(Path("d.mp4"), Outcome.REFUSED, reason="empty"),
        Upload(Path("e.mp4"), Outcome.FAILED, reason="no engine"),
    ]

    summary = summarise(uploads, [report(7), report(8)], 1.23456, link="unix")

    assert (summary.videos, summary.frames, summary.bytes) == (2, 100, 2000)
    assert (summary.mismatched, summary.lost, summary.refused, summary.failed) == (1, 1, 1, 1)
    assert (summary.peak_in_flight, summary.max_concurrent_videos) == (2, 3)
    assert summary.seconds == 1.235
    assert summary.link == "unix"


def test_each_worker_is_listed_and_the_peak_is_the_maximum() -> None:
    reports = [report(7, peak_in_flight=1, videos=2), report(8, peak_in_flight=3)]

    summary = summarise([], reports, 1.0, link="unix")

    assert summary.peak_in_flight == 3
    assert [(worker.pid, worker.videos, worker.peak_in_flight) for worker in summary.workers] == [
        (7, 2, 1),
        (8, 4, 3),
    ]
    first, second, _ = [text.plain for text in verdict(summary, good=True)]
    assert first.startswith("worker 7: 2 videos, at most 1 of 3 in flight and 700 of 1000 MB shared")
    assert second.endswith("3 decoded in place, 1.50 GB not copied")


def test_the_table_has_one_row_for_each_clip_with_its_medians() -> None:
    text = drawn(
        *(answered("a.mp4", transport_seconds=t) for t in (0.001, 0.003, 0.8)), answered("b.mp4", cuts=2)
    )

    [row_a] = [line for line in text.splitlines() if line.startswith("a.mp4")]
    [row_b] = [line for line in text.splitlines() if line.startswith("b.mp4")]
    assert row_a.split() == ["a.mp4", "3", "50", "64x48", "0.0", "250.0", "4.0", "3.0"]
    assert row_b.split()[:2] == ["b.mp4", "1"]


def test_a_long_file_name_hides_no_column() -> None:
    text = drawn(answered("x" * 200 + ".mp4"))

    [row] = [line for line in text.splitlines() if "64x48" in line]
    assert row.split()[1:] == ["1", "50", "64x48", "0.0", "250.0", "4.0", "2.0"]


def test_the_cuts_are_listed_by_frame_and_time() -> None:
    assert "cuts in a.mp4 at frame 5 (0.20 s), 10 (0.40 s)\n" in drawn(answered("a.mp4", cuts=2))


def test_a_clip_without_cuts_is_named_too() -> None:
    assert "no cuts in a.mp4\n" in drawn(answered("a.mp4"))


def test_a_long_list_of_cuts_is_cut_short() -> None:
    assert "and 8 more" in drawn(answered("a.mp4", cuts=20))


def test_each_problem_of_a_clip_is_printed_once() -> None:
    text = drawn(*[Upload(Path("d.mp4"), Outcome.REFUSED, reason="the file is empty")] * 3)

    assert text == "refused d.mp4: the file is empty\n"


@pytest.mark.parametrize(("good", "style"), [(True, "green"), (False, "red")])
def test_the_verdict_names_what_went_wrong(good: bool, style: str) -> None:
    lost = [] if good else [Upload(Path("c.mp4"), Outcome.LOST, reason="no answer")]
    summary = summarise([answered("a.mp4"), *lost], [report(7)], 1.0, link="unix")

    *_, text = verdict(summary, good=good)

    assert "1 videos, 50 frames, 0.00 GB of tensors in 1.0 s, link unix, 1 worker: " in text.plain
    assert text.plain.endswith("none lost, none mismatched" if good else "1 lost")
    assert style in str(text.spans[-1].style)
