"""The example of tracing prints one trace through both processes, from which the picture is drawn."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from docs.trace_picture import PICTURE, drawn

from traced import Row

ROOT = Path(__file__).parents[2]

# The processes and the names of the spans, in the order of their beginnings. The parent of a span is
# the last one before it with less indentation.
SPANS = [
    ("API server", "POST /videos"),
    ("API server", "  decode"),
    ("API server", "  aiotensor request"),
    ("API server", "    aiotensor send tensor"),
    ("API server", "      aiotensor wait for a permit"),
    ("API server", "      aiotensor wait for memory"),
    ("API server", "      aiotensor copy"),
    ("engine", "      aiotensor deliver tensor"),
    ("engine", "    aiotensor deliver message"),
    ("engine", "    aiotensor answer"),
    ("engine", "      forward"),
]


def test_the_example_prints_the_spans_of_both_processes() -> None:
    command = [sys.executable, "-W", "error", "examples/traced.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [
        re.fullmatch(r" *[\d.]+ ms +[\d.]+ ms  (.{10})  (.*)", line) for line in done.stdout.splitlines()
    ]
    assert [(line[1].strip(), line[2]) for line in lines if line] == SPANS
    assert all(lines)


def test_the_picture_has_a_bar_of_the_right_length_for_each_span() -> None:
    ms = 1_000_000
    spans = [
        (0, Row("API server", "POST /<videos>", 1, 2, 0, 5 * ms, 105 * ms)),
        (1, Row("engine", "forward", 1, 3, 2, 55 * ms, 105 * ms)),
    ]
    picture = ET.fromstring(drawn(spans))  # noqa: S314 - it was just made here
    bars = [bar for bar in picture.iter("{http://www.w3.org/2000/svg}rect") if bar.get("height") == "16"]
    widths = [float(bar.get("width", "")) for bar in bars]
    assert widths[0] == 2 * widths[1]
    starts = [float(bar.get("x", "")) for bar in bars]
    assert starts[1] - starts[0] == widths[1]
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"POST /<videos>", "forward", "100 ms", "50 ms"} <= set(texts)


def test_the_picture_of_the_documentation_shows_these_spans() -> None:
    picture = ET.parse(PICTURE)  # noqa: S314 - a file of the repository
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in {name.strip() for _, name in SPANS}] == [
        name.strip() for _, name in SPANS
    ]
