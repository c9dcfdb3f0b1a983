"""One line declares a counter, for its objects and for Prometheus."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]

BEFORE = "\n\nclass ReceiverStatistics("  # the class that follows the statistics of senders
LINE = '    tensors_retried: Annotated[Number, counter("Tensors that were sent again.")] = 0\n'

# Where it is counted: for each message that was sent.
COUNTED = '        self.counts["messages_sent"] += 1\n'
COUNT = '        self.counts["tensors_retried"] += 3\n'

# Sends a tensor, and prints the metrics before and after the sender is closed.
PROGRAM = """
import asyncio
import json
import sys

import torch
from aiotensor import TensorReceiver, TensorSender
from aiotensor.integrations.prometheus import AioTensorCollector
from prometheus_client import REGISTRY, generate_latest


async def main(address):
    REGISTRY.register(AioTensorCollector())
    async with TensorReceiver(address) as receiver:
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(torch.zeros(3)))
            field = sender.statistics().tensors_retried
            scrapes = [generate_latest().decode()]
        await asyncio.sleep(0)
        scrapes.append(generate_latest().decode())
    print(json.dumps({"field": field, "scrapes": scrapes}))


asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def copy_with_a_line_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package, and declare a counter."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "aiotensor", folder / "aiotensor", ignore=shutil.ignore_patterns("__pycache__"))
    types = folder / "aiotensor" / "types" / "statistics.py"
    before, found, after = types.read_text().partition(BEFORE)
    assert found
    types.write_text(before + LINE + found + after)
    grants = folder / "aiotensor" / "sending" / "grants.py"
    text = grants.read_text()
    assert COUNTED in text
    grants.write_text(text.replace(COUNTED, COUNTED + COUNT))
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


def test_a_declared_counter_is_exported_and_kept_after_closing(
    copy_with_a_line_more: Path, tmp_path: Path
) -> None:
    address = f"unix://{tmp_path}/receiver"
    printed = json.loads(run(copy_with_a_line_more, "-c", PROGRAM, address))
    assert printed["field"] == 3
    for scrape in printed["scrapes"]:
        families = {family.name: family for family in text_string_to_metric_families(scrape)}
        family = families["aiotensor_sender_tensors_retried"]
        assert (family.type, family.documentation) == ("counter", "Tensors that were sent again.")
        [sample] = family.samples
        assert (sample.labels, sample.value) == ({"endpoint": address}, 3)
    assert ["aiotensor_sender_permits_in_use{" in scrape for scrape in printed["scrapes"]] == [True, False]
