"""Write the result of API servers into README.md, for ``make bench-serving``."""

import re
import textwrap
from pathlib import Path

import msgspec

from bench.records import Report

__all__ = ["PAGE", "RESULTS", "updated"]

_ROOT = Path(__file__).parent.parent
PAGE = _ROOT / "README.md"
RESULTS = _ROOT / "bench" / "results" / "serving" / "latest.json"

_WIDTH = 128
_QUEUE = "torch.multiprocessing.Queue with handles"  # as the goals name it

_PLACE = re.compile(
    r"(<!-- number of bench/results/serving[^>]*-->\n).*?(<!-- end of the number -->)", re.DOTALL
)


def updated(page: str, report: Report) -> str:
    """Return a page with the number of a report between its markers."""
    return _PLACE.sub(lambda found: found[1] + _number(report) + "\n" + found[2], page)


def _number(report: Report) -> str:
    measured = {goal.work: goal.measured for goal in report.goals if goal.against == _QUEUE}
    rate = measured.get("serving, transfer: requests a second")
    memory = measured.get("serving, transfer: peak memory")
    whole_rate = measured.get("serving, decoding and transfer: requests a second")
    if rate is None or memory is None or whole_rate is None:
        raise ValueError("the report lacks a result of the queue: run all workloads of `make bench-serving`")
    text = (
        f"**{rate:.1f} times as many requests per second as `torch.multiprocessing.Queue`, with {memory:.0%} "
        "of its memory**, when three API servers send decoded videos to one engine. With the decoding "
        f"included, it is {whole_rate:.2f} times as many, since decoding takes most of the time. "
        "[docs/performance.md](docs/performance.md#api-servers-and-an-engine) describes the workload, and "
        "compares more alternatives."
    )
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    stored = msgspec.json.decode(RESULTS.read_bytes(), type=Report)
    PAGE.write_text(updated(PAGE.read_text(), stored))
