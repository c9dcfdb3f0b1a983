"""Compare real vLLM servers with and without `aiotensor.integrations.vllm`: `make bench-vllm-serve`.

Two servers run at a time: one of stock vLLM, and one with the plugin. They take turns with the same
requests. Each number is a multiple of that of stock vLLM in the same round.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click

from bench.measure import percentile
from bench.usage import PeakWatch, cpu_seconds, family
from bench.vllm_serve.server import Server, ask, client_of, running

_RESULTS = Path(__file__).parent / "results"
_VIDEOS = 60
_CONCURRENCY = 8
_TP2 = ("--tensor-parallel-size", "2")
# The name of the stock server, and its arguments; `torch_shm` is not possible with several workers.
_STOCK = {"torch_shm": ("--mm-tensor-ipc", "torch_shm"), "two workers": _TP2}
_PARTS = ("tensors", "tensors,broadcast")


class Round(NamedTuple):
    """What one server has used for all videos.

    Attributes:
        rate: the number of requests per second.
        p50: the median of the seconds of a request.
        p99: the 99th percentile of them.
        cpu: the seconds of processor time of all its processes.
        pss: the largest sum of their memory in bytes, in which shared pages count once.
    """

    rate: float
    p50: float
    p99: float
    cpu: float
    pss: float


def _measure(server: Server, count: int) -> tuple[Round, list[list[int]]]:
    seconds: list[float] = []
    answers: dict[int, list[int]] = {}

    async def load() -> None:
        todo = iter(range(count))

        async def client() -> None:
            async with client_of(server) as http:
                for number in todo:
                    began = time.perf_counter()
                    answers[number] = await ask(http, number)
                    seconds.append(time.perf_counter() - began)

        await asyncio.gather(*(client() for _ in range(_CONCURRENCY)))

    processes = family([server.process.pid])
    cpu, began = cpu_seconds(processes), time.perf_counter()
    with PeakWatch(lambda: _pss(processes), 1.0) as watch:
        asyncio.run(load())
    took, used = time.perf_counter() - began, cpu_seconds(processes) - cpu
    found = Round(count / took, statistics.median(seconds), percentile(seconds, 99), used, watch.peak_bytes)
    return found, [answers[number] for number in range(count)]


def _pss(processes: Sequence[int]) -> int:
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            total += int(line.split()[1]) << 10 if line.startswith("Pss:") else 0
    return total


def _compare(name: str, parts: str, rounds: int) -> Iterator[tuple[Round, Round]]:
    """Return the rounds of stock vLLM and of the plugin."""
    arguments = _STOCK[name]
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        contexts = running(*arguments), running(*arguments, AIOTENSOR_VLLM=parts)
        servers = list(threads.map(stack.enter_context, contexts))
        for server in servers:
            _measure(server, 12)
        for number in range(rounds):
            found = {}
            for server in servers if number % 2 else reversed(servers):
                found[server] = _measure(server, _VIDEOS)
            (stock, expected), (ours, answers) = (found[server] for server in servers)
            if answers != expected:
                raise RuntimeError(f"{name}, {parts}: the answers differ from those of stock vLLM")
            click.echo(f"{name}, {parts}, round {number + 1} of {rounds}: {stock} {ours}", err=True)
            yield stock, ours


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Loads of each pair of servers.")
@click.option("--results", type=click.Path(path_type=Path), default=_RESULTS, help="The folder of the table.")
def main(rounds: int, results: Path) -> None:
    """Measure each part of the integration against stock vLLM, with one and with two workers."""
    lines = [
        "# vLLM servers\n",
        f"{_VIDEOS} requests with videos of 2 to 37 MB, {_CONCURRENCY} at a time, to two API servers. "
        "Multiples of stock vLLM in the same round: the middle one, and the lowest and the highest.\n",
        "| stock vLLM | with | requests per second | p50 | p99 | processor time | peak memory (PSS) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in _STOCK:
        for parts in _PARTS:
            pairs = list(_compare(name, parts, rounds))
            cells = []
            for field in Round._fields:
                ratios = sorted(getattr(ours, field) / getattr(stock, field) for stock, ours in pairs)
                cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
            lines.append(f"| {name} | `{parts}` | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    click.echo(text)
    (results / "vllm-serving.md").write_text(text)


if __name__ == "__main__":
    main()
