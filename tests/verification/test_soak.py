"""A soak of two seconds, and the judgement of runs with growth, leftovers and failures."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from verification.soak.judge import judgements, leftovers, passes
from verification.soak.records import LINKS, Report, Sample

ROOT = Path(__file__).parent.parent.parent
PROCESSES = ["engine", "sender 1", "sender 2"]


@pytest.mark.timeout(400)  # longer than the soak's own time limits, which name the hanging step
def test_a_short_soak_checks_every_value_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verification.soak", "--seconds", "2", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert (tmp_path / "stderr.txt").read_text() == ""  # of all processes, until their ends
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    report = msgspec.json.decode((tmp_path / "soak.json").read_bytes(), type=Report)
    assert (report.failures, report.judgements) == ([], [])
    assert report.processes == PROCESSES
    for link in LINKS:
        assert report.visitors[link] > 0
        assert report.rest[link]["engine"]["tensors checked"] > 20
        for process in PROCESSES:
            mine = [one.numbers for one in report.samples if (one.link, one.process) == (link, process)]
            assert len(mine) > 5
            always = {"own memory", "other shared memory", "descriptors", "threads", "mappings"}
            assert always <= set.intersection(*map(set, mine))
            of_its_own = {"tensors checked"} if process == "engine" else {"fragmentation", "permits"}
            assert of_its_own <= mine[-1].keys()


def made_up(seconds: float = 600, **growth: float) -> Report:
    """Return a report of a run in which numbers of one process grow, each at a rate per second."""
    samples = [
        Sample(
            float(at),
            link,
            process,
            {
                "descriptors": 20.0 + at % 3,
                "own memory": 2e8 + 1e6 * (at % 7),
                **{
                    name.replace("_", " "): 100 + rate * at * ((link, process) == ("unix", "engine"))
                    for name, rate in growth.items()
                },
            },
        )
        for at in range(int(seconds))
        for link in LINKS
        for process in PROCESSES
    ]
    report = Report(seconds, 1, PROCESSES, samples, {}, dict.fromkeys(LINKS, 1), [])
    return msgspec.structs.replace(report, judgements=judgements(report))


def test_a_run_in_which_nothing_grows_passes() -> None:
    report = made_up()
    assert len(report.judgements) == 2 * len(LINKS) * len(PROCESSES)
    assert passes(report)


@pytest.mark.parametrize(
    ("number", "rate"),
    [
        ("descriptors", 0.01),
        ("own_memory", 60e3),
        ("other_shared_memory", 120e3),
        ("object_blocks", 6),
        ("threads", 0.01),
        ("mappings", 0.1),
    ],
)
def test_growth_of_one_quantity_in_one_process_fails_the_run(number: str, rate: float) -> None:
    report = made_up(**{number: rate})
    growing = [(one.quantity, one.link, one.process) for one in report.judgements if one.grows]
    assert growing == [(number.replace("_", " "), "unix", "engine")]
    assert not passes(report)


def test_a_run_that_is_too_short_is_not_judged() -> None:
    report = made_up(20, descriptors=5)
    assert report.judgements == []
    assert passes(report)


def test_leftovers_and_failures_fail_the_run() -> None:
    left = leftovers(
        {"unix": {"engine": {"leases": 1, "bytes": 7}, "sender 1": {"free runs": 1, "permits": 2}}}
    )
    assert left == [
        "engine (unix) ended with leases at 1 rather than 0",
        "sender 1 (unix) ended with permits at 2 rather than 0",
    ]
    assert not passes(msgspec.structs.replace(made_up(), failures=left))
