"""The tables, the plots and the JSON of a report."""

from pathlib import Path

import msgspec
import pytest
from PIL import Image

from bench import tables
from bench.__main__ import write
from bench.records import Failure, Report, Skip
from bench.views import VIEWS
from bench.workloads import WORKLOADS
from tests.bench.reports import CHANNEL, IN_PLACE, OURS, RANKS, report

FAILURE = Failure("round-trip", "torch-queue", None, 1, 4096, "ended with exit status 1", "out of luck")


def rows_of(text: str, first_cell: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] == first_cell]


def table_of(of: Report, title: str) -> str:
    return tables.markdown(of).split(f"## {title}\n")[1].split("\n## ")[0]


def test_each_goal_is_listed_with_its_measurement() -> None:
    text = tables.goals(report())
    (row, *limits) = rows_of(text, "4 KiB round trip, `unix://`")
    assert row[1:] == [
        "torch.multiprocessing.Queue",
        "at least 6x faster",
        "5.00x (3.33x to 10.0x)",
        "MISSED",
    ]
    assert [limit[1] for limit in limits] == [
        "raw Unix socket echo, blocking",
        "raw Unix socket echo, on the event loop",
        "ZeroMQ over `ipc://`, blocking",
    ]
    assert rows_of(text, "idle pair")[0][2:] == ["0.0 % CPU", "0.00 %", "met"]
    assert rows_of(text, "16 MiB, copied")[0][3:] == ["-", "not measured"]
    assert [row[-1] for row in rows_of(text, "150 MiB request and reply, echo")] == ["met", "not measured"]
    assert rows_of(text, "150 MiB to 4 readers")[0][3:] == ["30.0x", "met"]
    assert rows_of(text, "150 MiB round trip between ranks, two hosts")[0][3:] == ["2.00x", "met"]
    assert rows_of(text, "serving, decoding and transfer: requests a second")[0][3:] == ["3.00x", "met"]
    summary, missed, _ = text.split("\n\n", 2)
    assert summary.startswith("13 of 63 goals met.")
    assert missed == "Missed:"
    assert (
        "- 4 KiB round trip, `unix://`, against torch.multiprocessing.Queue: 5.00x (3.33x to 10.0x); the "
        "goal is at least 6x faster\n"
    ) in text


def test_a_workload_has_a_row_for_each_contender_and_a_column_for_each_size() -> None:
    text = table_of(report(), WORKLOADS["round-trip"].title)
    assert "| 4 KiB " in text
    assert "| 150 MiB " in text
    times, ratios = rows_of(text, f"{OURS} (uvloop)")
    assert times[1:] == ["2.00 ms / 4.00 ms"] * 2
    assert ratios[1:] == ["5.00x (4.00 to 6.00)"] * 2


def test_a_table_lists_only_contenders_of_the_kind_of_its_workload() -> None:
    of = report(skips=[Skip("ray", "ray is not installed"), Skip("zmq-pickle", "a quick run leaves it out")])
    requests = table_of(of, WORKLOADS["request-echo"].title)
    assert len(rows_of(requests, f"{CHANNEL} (uvloop)")) == 2
    assert rows_of(requests, "zmq-pickle")[0][1:] == ["-", "-"]
    assert rows_of(requests, "zmq-echo")[0][1:] == ["500 us / 1.00 ms", "-"]
    assert "zmq-pickle: a quick run leaves it out" in requests
    assert "torch-queue" not in requests
    assert "ray" not in requests
    trips = table_of(of, WORKLOADS["round-trip"].title)
    assert "zmq-" not in trips
    assert CHANNEL not in trips


def test_a_table_between_hosts_lists_only_contenders_that_span_hosts() -> None:
    text = table_of(report(), WORKLOADS["two-hosts"].title)
    assert rows_of(text, f"{RANKS} (uvloop)")[0][1:] == ["300 ms / 600 ms"]
    assert rows_of(text, "gloo")[0][1:] == ["600 ms / 1.20 s"]
    assert OURS not in text
    assert "torch-queue" not in text


def test_the_table_of_an_unmeasured_workload_states_the_reason() -> None:
    of = report(skips=[Skip(name, "forbidden", "two-hosts") for name in (RANKS, "gloo")])
    text = table_of(msgspec.structs.replace(of, results=[]), WORKLOADS["two-hosts"].title)
    reason = f"Not measured (`-`): {RANKS}, gloo: forbidden"
    assert [part.strip() for part in text.split("\n\n")] == ["No contender was measured.", reason]


def test_rates_are_in_tensors_for_small_sizes_and_in_bytes_for_large_ones() -> None:
    row, _ = rows_of(table_of(report(), WORKLOADS["fan-in"].title), "torch-queue")
    assert row[1:] == ["1,000 /s", "16,000 /s", "1.50 GB/s", "24.0 GB/s"]


def test_a_broadcast_has_a_column_for_each_size_and_number_of_readers() -> None:
    text = table_of(report(), WORKLOADS["broadcast"].title)
    assert "| 4 KiB, 1 reader | 4 KiB, 4 readers | 150 MiB, 1 reader | 150 MiB, 4 readers |" in " ".join(
        text.split()
    )
    assert rows_of(text, "zmq-xpub")[0][1:] == ["30.0 ms / 60.0 ms"] * 4


def test_servers_have_a_row_with_rate_latency_processor_time_memory_and_lateness() -> None:
    of = report(skips=[Skip(IN_PLACE, "nothing is left to transfer", "serving-transfer")])
    decoding = table_of(of, WORKLOADS["serving-decoding"].title)
    assert rows_of(decoding, f"{IN_PLACE} (uvloop)")[0][1:] == [
        *("4.5 MiB", "300", "3.00x", "133 ms / 267 ms", "3.33 ms", "50.0 MiB"),
        *("2.00 ms / 5.00 ms / 9.00 ms", "2.0 MiB / 0.0 MiB"),
    ]
    transfer = table_of(of, WORKLOADS["serving-transfer"].title)
    assert set(rows_of(transfer, IN_PLACE)[0][2:]) == {"-"}
    assert f"{IN_PLACE}: nothing is left to transfer" in transfer
    assert OURS not in decoding


def test_an_unmeasured_contender_has_a_dash_and_a_reason() -> None:
    skips = [Skip("ray", "ray is not installed"), Skip("torch-queue", "it blocks", "loop-lag")]
    of = report(skips=skips)
    lag = table_of(of, WORKLOADS["loop-lag"].title)
    assert set(rows_of(lag, "torch-queue")[0][2:]) == {"-"}
    assert set(rows_of(lag, "ray")[0][2:]) == {"-"}
    assert not rows_of(lag, "raw-socket")  # a limit is named only where it was measured
    assert "ray: ray is not installed; torch-queue: it blocks" in lag
    assert tables.skipped(of) == "ray: ray is not installed"


def test_a_failed_contender_is_listed_and_its_output_shown_once() -> None:
    failures = [
        msgspec.structs.replace(FAILURE, contender="ray", workload=name) for name in ("idle", "round-trip")
    ]
    of = report(failures=[FAILURE, *failures])
    assert rows_of(table_of(of, WORKLOADS["idle"].title), "ray")[0][2:] == ["failed"]
    text = tables.failures(of)
    assert "FAILED ray in idle, round 2: it ended with exit status 1." in text
    assert text.count("out of luck") == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_a_view(name: str) -> None:
    assert VIEWS[name]


def test_tables_are_markdown_with_aligned_columns() -> None:
    lines = tables.goals(report()).split("\n\n")[-1].splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == set("|- ")


def test_a_report_is_written_as_json_markdown_and_plots(tmp_path: Path) -> None:
    written = write(report(failures=[FAILURE]), tmp_path / "made" / "here")
    assert [path.name for path in written] == [
        "latest.json",
        "latest.md",
        "latency.png",
        "throughput.png",
        "two-hosts.png",
        "loop-lag.png",
        "senders.png",
        "requests.png",
        "broadcast-readers.png",
        "broadcast-sizes.png",
        "serving.png",
    ]
    assert msgspec.json.decode(written[0].read_bytes(), type=Report) == report(failures=[FAILURE])
    assert "## Failures" in written[1].read_text()
    for plot in written[2:]:
        with Image.open(plot) as image:
            image.verify()
            assert min(image.size) > 400


def test_a_report_without_results_has_no_plots(tmp_path: Path) -> None:
    written = write(msgspec.structs.replace(report(), results=[]), tmp_path)
    assert [path.name for path in written] == ["latest.json", "latest.md"]
