"""Draw the spans of one upload, as examples/traced.py records them; run by ``make docs-trace``."""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from traced import Row, ordered, record

__all__ = ["PICTURE", "drawn"]

PICTURE = Path(__file__).with_name("trace.svg")

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 960, 300, 80, 64, 26
_FILLS = {"API server": "#60a5fa", "engine": "#f59e0b"}
_STEPS = (1, 2, 5)


def drawn(spans: list[tuple[int, Row]]) -> str:
    """Return a picture of spans: a row with a bar for each, from its beginning to its end.

    Args:
        spans: the spans with their depths, each before its children.
    """
    began, ended = min(row.began for _, row in spans), max(row.ended for _, row in spans)
    scale = (_WIDTH - _LEFT - _RIGHT) / (ended - began)
    height = _TOP + _ROW * len(spans) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" aria-labelledby="title">',
        '  <title id="title">The spans of one upload, in the API server and in the engine</title>',
        f'  <rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (process, fill) in enumerate(_FILLS.items()):
        x = 16.0 + 120 * number
        parts.append(f'  <rect x="{x:.0f}" y="14" width="14" height="14" rx="3" fill="{fill}"/>')
        parts.append(f'  <text x="{x + 20:.0f}" y="26" fill="#0f172a">{process}</text>')
    for at in _ticks((ended - began) / 1e6):
        x = _LEFT + at * 1e6 * scale
        parts.append(f'  <path d="M{x:.1f} {_TOP - 12} V{height - 12}" stroke="#e2e8f0"/>')
        parts.append(
            f'  <text x="{x:.1f}" y="{_TOP - 18}" fill="#64748b" text-anchor="middle">{at:g} ms</text>'
        )
    for number, (depth, row) in enumerate(spans):
        y = _TOP + _ROW * number
        x, width = _LEFT + (row.began - began) * scale, max((row.ended - row.began) * scale, 2)
        lasted = (row.ended - row.began) / 1e6
        parts.append(f'  <text x="{16 + 14 * depth}" y="{y + 16}" fill="#0f172a">{escape(row.name)}</text>')
        fill = _FILLS[row.process]
        parts.append(
            f'  <rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="16" rx="3" fill="{fill}"/>'
        )
        text = f"{lasted:.0f} ms" if lasted >= 10 else f"{lasted:.1f} ms"
        parts.append(f'  <text x="{x + width + 6:.1f}" y="{y + 16}" fill="#475569">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(total_ms: float) -> list[float]:
    """Return the times to mark, in milliseconds: at most seven round numbers."""
    power = 1.0
    while True:
        for step in _STEPS:
            if total_ms / (step * power) < 7:
                return [step * power * number for number in range(int(total_ms / (step * power)) + 1)]
        power *= 10


if __name__ == "__main__":
    PICTURE.write_text(drawn(ordered(record())))
