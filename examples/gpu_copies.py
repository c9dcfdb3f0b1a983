"""Compare the ways to copy a received tensor to a GPU, and check that each of them copies all values.

python examples/gpu_copies.py

It receives one tensor of 150 MiB in shared memory, and copies it several times in each way. Each time is the
time until the GPU has all bytes. Without a GPU, it says so and ends.

On an H200 with 16 CPU cores, these were the times as multiples of a copy from a pinned buffer that was filled
before: 2.5 through a pinned buffer, 2.6 with ``frames.pin_memory()`` (which copies into new pinned memory),
7.7 to 9.3 with ``frames.to(device)``, with or without `non_blocking=True`, and 3.4 to 4.4 with memory that is
registered for the copy. The copy into the buffer uses several threads, so measure on your machine.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aiotensor import TensorReceiver, TensorSender

NBYTES = 150 << 20
ROUNDS = 20


@contextmanager
def registered(tensor: torch.Tensor) -> Iterator[None]:
    """Pin the memory of a tensor in place while it lives; unregister it before the tensor is freed."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.check_error(cuda.cudaHostUnregister(tensor.data_ptr()))


def compare(received: torch.Tensor, device: torch.device) -> None:
    """Print the median time of each way."""
    buffer = torch.empty_like(received, pin_memory=True)

    def through_buffer() -> torch.Tensor:
        return buffer.copy_(received).to(device, non_blocking=True)

    def in_registered_memory() -> torch.Tensor:
        with registered(received):
            return received.to(device, non_blocking=True)

    measure("a copy within the CPU, into the pinned buffer", lambda: buffer.copy_(received))
    measure("from the pinned buffer", lambda: buffer.to(device, non_blocking=True))
    measure("through the pinned buffer", through_buffer)
    measure("tensor.pin_memory()", lambda: received.pin_memory().to(device, non_blocking=True))
    measure("tensor.to(device)", lambda: received.to(device))
    measure("tensor.to(device, non_blocking=True)", lambda: received.to(device, non_blocking=True))
    measure("registered for this copy", in_registered_memory)
    with registered(received):
        measure("registered before", lambda: received.to(device, non_blocking=True))


def measure(name: str, copy: Callable[[], torch.Tensor]) -> None:
    """Time a copy, and check its values; the first rounds warm up."""
    times, returned = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        copied = copy()
        returned.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        expected = torch.arange(NBYTES, device=copied.device).to(torch.uint8)
        assert torch.equal(copied, expected), f"{name}: the values differ"  # noqa: S101 - it is a check
    median, until_return = statistics.median(times[5:]), statistics.median(returned[5:])
    rate = NBYTES / median / 1e9
    print(f"{name:48} {median * 1e3:7.2f} ms {rate:6.1f} GB/s, returned after {until_return * 1e3:7.2f} ms")


async def main(device: torch.device) -> None:
    """Send one tensor to a receiver in the same process, and copy it to the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{os.path.join(folder, 'copies.sock')}"
        async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
            handle = await sender.send(torch.arange(NBYTES).to(torch.uint8))
            received = await receiver.receive(handle)
            print(f"{NBYTES >> 20} MiB to {torch.cuda.get_device_name(device)}")
            await asyncio.to_thread(compare, received, device)


if __name__ == "__main__":
    if torch.cuda.is_available():
        asyncio.run(main(torch.device("cuda:0")))
    else:
        print("there is no GPU on this machine, or torch was built without CUDA")
