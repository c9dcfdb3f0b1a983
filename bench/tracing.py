"""Measure the cost of tracing: `make bench-tracing`.

Both sides run in one process, on uvloop, so the times include the work of sender and receiver. The ways take
turns in each round. Spans that are recorded go to a batch processor, whose exporter discards them.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import uvloop
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from aiotensor.integrations.opentelemetry import instrument, uninstrument
from bench.calls import KINDS, Kind, count
from bench.measure import format_seconds

_RESULTS = Path(__file__).parent / "results" / "tracing.md"
_STEPS, _WARM_UP = 300, 50
_WAYS: dict[str, Sampler | None] = {"off": None, "not sampled": ALWAYS_OFF, "recorded": ALWAYS_ON}


class _Discarding(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@contextmanager
def _traced(sampler: Sampler | None) -> Iterator[None]:
    if sampler is None:
        yield
        return
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Discarding()))
    instrument(provider)
    try:
        yield
    finally:
        uninstrument()
        provider.shutdown()


async def _measure(kind: Kind, rounds: int) -> dict[str, list[float]]:
    """Return the median time of a step in each round, in seconds, by the way."""
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        async with kind.opened(folder) as step:
            for number in range(rounds):
                ways = list(_WAYS.items())
                for way, sampler in ways if number % 2 else reversed(ways):
                    with _traced(sampler):
                        times = []
                        for _ in range(_WARM_UP + _STEPS):
                            began = time.perf_counter()
                            await step()
                            times.append(time.perf_counter() - began)
                    found[way].append(statistics.median(times[_WARM_UP:]))
    return found


def _rows(kind: Kind, rounds: int) -> Iterator[str]:
    times = uvloop.run(_measure(kind, rounds))
    for way, sampler in _WAYS.items():
        with _traced(sampler):
            calls = count(kind)
        ratios = sorted(mine / off for mine, off in zip(times[way], times["off"], strict=True))
        middle = format_seconds(statistics.median(times[way]))
        multiple = f"{statistics.median(ratios):.1f}x ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        yield f"| {kind.name} | {way} | {middle} | {multiple if sampler else ''} | {calls:.0f} |"


@click.command()
@click.option("--rounds", default=7, show_default=True, help="Rounds of each step.")
def main(rounds: int) -> None:
    """Measure each step without tracing, with spans that are not sampled, and with recorded spans."""
    lines = [
        "# The cost of tracing",
        "",
        "Both sides in one process, on uvloop. Medians of the rounds, and the multiple of the time without "
        "tracing in the same round: the middle one, in brackets the lowest and the highest.",
        "",
        "| step | tracing | time | of the time without | calls of Python functions |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        lines += _rows(kind, rounds)
    text = "\n".join([*lines, ""])
    _RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
