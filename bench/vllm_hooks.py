"""Compare ways to carry tensors through vLLM's encoder and decoder: `make bench-vllm`.

A client encodes a message with one tensor in its event loop and sends it to an engine process, which decodes
it and answers with one byte of the tensor. It is separate from `bench`, because importing vLLM takes long.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import zmq
import zmq.asyncio

from aiotensor import TensorQueue, TensorSender, blocking
from aiotensor.integrations.vllm import TensorConsumer, TensorProvider
from bench.vllm_rounds import Result, comparison, prepare


class _Message(msgspec.Struct):
    pixels: torch.Tensor


def _engine(way: str, queue: Any, address: str) -> None:
    prepare()
    from vllm.v1.engine.tensor_ipc import TensorIpcReceiver
    from vllm.v1.serial_utils import MsgpackDecoder

    with ExitStack() as stack:
        if way == "aiotensor":
            provider: Any = TensorProvider(stack.enter_context(blocking.TensorReceiver(queue)))
        else:
            provider = TensorIpcReceiver(queue)
        decoder = MsgpackDecoder(_Message, oob_tensor_provider=provider)
        socket = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.PAIR))
        socket.connect(address)
        socket.send(b"ready")
        while buffers := socket.recv_multipart(copy=False):
            if not buffers[0].buffer:
                break
            message = decoder.decode(buffers)
            socket.send(bytes([int(message.pixels[-1])]))
            del message, buffers


def _client(way: str, sizes: Sequence[int], results: Connection) -> None:
    prepare()
    from vllm.v1.engine.tensor_ipc import TensorIpcSender
    from vllm.v1.serial_utils import MsgpackEncoder

    context = torch.multiprocessing.get_context("spawn")
    queue: Any = TensorQueue() if way == "aiotensor" else context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine"
        engine = context.Process(target=_engine, args=(way, queue, address), daemon=True)
        engine.start()

        async def measure() -> list[Result]:
            async with AsyncExitStack() as stack:
                if way == "aiotensor":
                    sender = await stack.enter_async_context(TensorSender(queue, 140, 8 << 30))
                    await sender.ready()
                    consumer: Any = TensorConsumer(sender)
                else:
                    consumer = TensorIpcSender(queue)
                encoder = MsgpackEncoder(oob_tensor_consumer=consumer)
                socket = stack.enter_context(stack.enter_context(zmq.asyncio.Context()).socket(zmq.PAIR))
                socket.bind(address)
                await socket.recv()
                found = [await _measure_size(socket, encoder, way, nbytes) for nbytes in sizes]
                await socket.send(b"")
            return found

        results.send(asyncio.run(measure()))
        engine.join()


async def _measure_size(socket: "zmq.asyncio.Socket", encoder: Any, way: str, nbytes: int) -> Result:
    result = Result(way, nbytes, [], [])
    # A new tensor each time: `torch_shm` spends most of its time on sharing the memory of a tensor.
    for tensor in result.tensors():
        message = _Message(tensor)
        consumer = encoder.oob_tensor_consumer
        began = time.perf_counter()
        with consumer.message() if isinstance(consumer, TensorConsumer) else nullcontext():
            buffers = encoder.encode(message)
        encoded = time.perf_counter()
        await socket.send_multipart(buffers, copy=False)
        [answer] = await socket.recv()
        result.add(tensor, {answer}, began, encoded, time.perf_counter())
    return result


main = comparison(
    "vllm-hooks.md",
    "# vLLM's encoder and decoder\n\n"
    "A message with one tensor: from the call of `encode` in the event loop of a client until the answer of "
    "an engine process that has decoded it.",
    ("torch_shm", "aiotensor"),
    _client,
    "round trip",
    "`encode`",
)


if __name__ == "__main__":
    main()
