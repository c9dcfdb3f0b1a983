"""Compare ways to carry tensors through vLLM's encoder and decoder: `make bench-vllm`.

A client encodes a message with one tensor in its event loop and sends it to an engine process, which decodes
it and answers with one byte of the tensor. Each way has fresh processes in each round, and the rounds
alternate. It is separate from `bench`, because importing vLLM takes 15 seconds.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import torch
import zmq
import zmq.asyncio

from bench.measure import format_seconds, format_size, parse_size

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_WAYS = ("torch_shm", "aiotensor")


class Result(NamedTuple):
    """Seconds of one size in one round."""

    way: str
    nbytes: int
    round_trips: list[float]
    encodes: list[float]


class _Message(msgspec.Struct):
    pixels: torch.Tensor


def _configure(way: str) -> None:
    """Set what vLLM reads when it is imported, in each process."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["AIOTENSOR_VLLM"] = "tensors" if way == "aiotensor" else ""
    torch.set_num_threads(1)


def _engine(way: str, queue: Any, address: str) -> None:
    _configure(way)
    from vllm.v1.engine import core
    from vllm.v1.serial_utils import MsgpackDecoder

    decoder = MsgpackDecoder(_Message, oob_tensor_provider=core.TensorIpcReceiver(queue))
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        socket.send(b"ready")
        while buffers := socket.recv_multipart(copy=False):
            if not buffers[0].buffer:
                break
            message = decoder.decode(buffers)
            socket.send(bytes([int(message.pixels[-1])]))
            del message, buffers


def _client(way: str, sizes: Sequence[int], repeats: Sequence[int], results: Connection) -> None:
    """Measure one way, in a fresh process."""
    _configure(way)
    from aiotensor.integrations.vllm import plugin

    plugin.register()
    from vllm.v1.engine import core_client, utils

    context = utils.get_mp_context()
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine"
        engine = context.Process(target=_engine, args=(way, queue, address), daemon=True)
        engine.start()

        async def measure() -> list[Result]:
            with zmq.asyncio.Context() as zmq_context, zmq_context.socket(zmq.PAIR) as socket:
                socket.bind(address)
                await socket.recv()
                consumer = core_client.TensorIpcSender(queue)
                consumer.is_async = True  # as vLLM's asynchronous client sets it through the plugin
                encoder = core_client.MsgpackEncoder(oob_tensor_consumer=consumer)
                found = [
                    await _measure_size(socket, encoder, way, nbytes, count)
                    for nbytes, count in zip(sizes, repeats, strict=True)
                ]
                await socket.send(b"")
            return found

        results.send(asyncio.run(measure()))
        engine.join()


async def _measure_size(
    socket: "zmq.asyncio.Socket", encoder: Any, way: str, nbytes: int, count: int
) -> Result:
    result = Result(way, nbytes, [], [])
    warm_up = max(3, count // 10)
    for number in range(warm_up + count):
        # A new tensor each time: `torch_shm` spends most of its time on sharing the memory of a tensor.
        message = _Message(torch.full((nbytes,), number % 251, dtype=torch.uint8))
        began = time.perf_counter()
        buffers = encoder.encode(message)
        encoded = time.perf_counter()
        await socket.send_multipart(buffers, copy=False)
        [answer] = await socket.recv()
        ended = time.perf_counter()
        if answer != number % 251:
            raise RuntimeError(f"{way}: tensor {number} arrived with other values")
        if number >= warm_up:
            result.round_trips.append(ended - began)
            result.encodes.append(encoded - began)
    return result


def _table(results: list[Result], sizes: Sequence[int]) -> str:
    lines = [
        "# vLLM's encoder and decoder",
        "",
        "A message with one tensor: from the call of `encode` in the event loop of a client until the answer "
        "of an engine process that has decoded it. Medians over all rounds, p99 in brackets; the ratio is "
        "that of the medians of each round: the middle one, in brackets the lowest and the highest.",
        "",
        "| tensor | way | round trip | `encode` | round trip of `torch_shm` is |",
        "|---|---|---|---|---|",
    ]
    for nbytes in sizes:
        rounds = {way: [one for one in results if (one.way, one.nbytes) == (way, nbytes)] for way in _WAYS}
        ratios = sorted(
            statistics.median(theirs.round_trips) / statistics.median(ours.round_trips)
            for theirs, ours in zip(rounds["torch_shm"], rounds["aiotensor"], strict=True)
        )
        for way in _WAYS:
            trips = sorted(seconds for one in rounds[way] for seconds in one.round_trips)
            encodes = sorted(seconds for one in rounds[way] for seconds in one.encodes)
            ratio = f"{statistics.median(ratios):.2g}x ({ratios[0]:.2g} to {ratios[-1]:.2g})"
            lines.append(
                f"| {format_size(nbytes)} | {way} | {_summary(trips)} | {_summary(encodes)} "
                f"| {ratio if way == 'aiotensor' else ''} |"
            )
    return "\n".join(lines) + "\n"


def _summary(ordered: list[float]) -> str:
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return f"{format_seconds(statistics.median(ordered))} ({format_seconds(p99)})"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Fresh processes of each way.")
@click.option("--sizes", default="4KiB,1MiB,150MiB", help="Bytes of the tensor, with commas.")
@click.option("--results", type=click.Path(path_type=Path), default=_RESULTS, help="The folder of the table.")
def main(rounds: int, sizes: str, results: Path) -> None:
    """Compare vLLM's torch_shm with aiotensor, and write the table to vllm-hooks.md."""
    nbytes = [parse_size(size) for size in sizes.split(",")]
    repeats = [10 if size > 16 << 20 else 300 for size in nbytes]
    context = torch.multiprocessing.get_context("spawn")
    found: list[Result] = []
    for number in range(rounds):
        for way in _WAYS if number % 2 else reversed(_WAYS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(way, nbytes, repeats, theirs))
            process.start()
            theirs.close()
            found += ours.recv()
            process.join()
            click.echo(f"round {number + 1} of {rounds}: {way}", err=True)
    table = _table(found, nbytes)
    click.echo(table)
    results.mkdir(parents=True, exist_ok=True)
    (results / "vllm-hooks.md").write_text(table)


if __name__ == "__main__":
    main()
