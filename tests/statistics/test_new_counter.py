"""One line declares a counter, for its objects, for Prometheus and for the documentation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]

BEFORE = "    messages_sent: Annotated[Number, counter("
LINE = '    tensors_retried: Annotated[Number, counter("Tensors that were sent again.")]\n'
ROW = "| `aiotensor_sender_tensors_retried_total` | counter | `endpoint` | Tensors that were sent again. |"

# Counts in an open object, closes it, and prints the metrics before and after.
PROGRAM = """
import asyncio
import json

from aiotensor.integrations.prometheus import AioTensorCollector
from aiotensor.statistics import registry
from aiotensor.statistics.counters import WaitCounter, new_counts, snapshot
from aiotensor.types import SenderStatistics
from prometheus_client import REGISTRY, generate_latest


class Sender:
    def __init__(self):
        self.counts = new_counts(SenderStatistics)

    def statistics(self):
        waits = WaitCounter().waits()
        gauges = dict.fromkeys(set(SenderStatistics.__struct_fields__) - set(self.counts), 0)
        others = {"holders": (), "permit_waits": waits, "memory_waits": waits, "errors": {}}
        return snapshot(SenderStatistics, self.counts, **{**gauges, **others})


async def main():
    REGISTRY.register(AioTensorCollector())
    sender = Sender()
    entry = registry.add(sender, "unix:///run/sender", asyncio.get_running_loop())
    sender.counts["tensors_retried"] += 3
    scrapes = [generate_latest().decode()]
    registry.remove(entry)
    await asyncio.sleep(0)
    scrapes.append(generate_latest().decode())
    print(json.dumps({"field": sender.statistics().tensors_retried, "scrapes": scrapes}))


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def copy_with_a_line_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package and the page on metrics, and declare a counter."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "aiotensor", folder / "aiotensor", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    for name in ("metrics.md", "metrics_tables.py"):
        shutil.copy(ROOT / "docs" / name, folder / "docs")
    types = folder / "aiotensor" / "types.py"
    before, found, after = types.read_text().partition(BEFORE)  # of the sender, which is the first
    assert found
    types.write_text(before + LINE + found + after)
    return folder


def run(folder: Path, *arguments: str) -> str:
    """Run Python with the copy of the package, and return its output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_counter_that_one_line_declares_is_exported_and_survives_closing(
    copy_with_a_line_more: Path,
) -> None:
    printed = json.loads(run(copy_with_a_line_more, "-c", PROGRAM))
    assert printed["field"] == 3
    for scrape in printed["scrapes"]:
        families = {family.name: family for family in text_string_to_metric_families(scrape)}
        family = families["aiotensor_sender_tensors_retried"]
        assert (family.type, family.documentation) == ("counter", "Tensors that were sent again.")
        [sample] = family.samples
        assert (sample.labels, sample.value) == ({"endpoint": "unix:///run/sender"}, 3)
    assert ["aiotensor_sender_permits_in_use{" in scrape for scrape in printed["scrapes"]] == [True, False]


def test_a_counter_that_one_line_declares_is_documented(copy_with_a_line_more: Path) -> None:
    page = copy_with_a_line_more / "docs" / "metrics.md"
    before = page.read_text().splitlines()
    run(copy_with_a_line_more, "docs/metrics_tables.py")
    after = page.read_text().splitlines()
    assert after.count(ROW) == 1
    assert [line for line in after if line != ROW] == before
