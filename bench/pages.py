"""Write the result of API servers into README.md, for ``make bench-serving``."""

import re
import textwrap
from pathlib import Path

import msgspec

from bench.records import Report

_ROOT = Path(__file__).parent.parent
PAGE = _ROOT / "README.md"
RESULTS = _ROOT / "bench" / "results" / "serving" / "latest.json"

_WIDTH = 128
_QUEUE = "torch.multiprocessing.Queue with handles"  # as the goals name it
_PICKLE = "pickle 5 over ZeroMQ, out of band"

_PLACE = re.compile(
    r"(<!-- number of bench/results/serving[^>]*-->\n).*?(<!-- end of the number -->)", re.DOTALL
)


def updated(page: str, report: Report) -> str:
    """Return a page with the number of a report between its markers."""
    return _PLACE.sub(lambda found: found[1] + _number(report) + "\n" + found[2], page)


def _number(report: Report) -> str:
    measured = {(goal.work, goal.against): goal.measured for goal in report.goals}

    def ratio(work: str, against: str) -> float:
        found = measured.get((f"serving, {work}", against))
        if found is None:
            raise ValueError(f"the report lacks a result of {against}: run all of `make bench-serving`")
        return found

    rate, memory = "transfer: requests a second", "transfer: peak memory"
    whole_rate, whole_memory = f"decoding and {rate}", f"decoding and {memory}"
    text = (
        f"**{ratio(rate, _QUEUE):.1f} times as many requests per second as `torch.multiprocessing.Queue` "
        f"with {ratio(memory, _QUEUE):.0%} of its memory, and {ratio(rate, _PICKLE):.1f} times as many as "
        f"ZeroMQ with pickle 5 with {ratio(memory, _PICKLE):.0%} of its memory**, when three API servers "
        "send decoded videos to one engine. With the decoding included, which takes most of the time, it is "
        f"{ratio(whole_rate, _QUEUE):.2f} times as many with {ratio(whole_memory, _QUEUE):.0%}, and "
        f"{ratio(whole_rate, _PICKLE):.2f} times as many with {ratio(whole_memory, _PICKLE):.0%}. "
        "[docs/performance.md](docs/performance.md#api-servers-and-an-engine) describes the workload."
    )
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    stored = msgspec.json.decode(RESULTS.read_bytes(), type=Report)
    PAGE.write_text(updated(PAGE.read_text(), stored))
