"""An engine with its model on a GPU. Start it with any of the servers; without a GPU, it uses the CPU.

python examples/gpu_engine.py

It processes the requests that are ready in one batch. While the GPU works on one video, the processor copies
the next one into pinned memory, from which the GPU fetches it.

aiotensor sends CPU tensors, and a received tensor is in ordinary shared memory. The simplest way to a GPU is
``frames.to(device)``, in asyncio code ``await asyncio.to_thread(frames.to, device)``, because the copy blocks
its thread. It can take several times as long as this program, which needs three things:

- A pinned buffer. A GPU reads asynchronously only from pinned memory. Pin memory of your own once, as here:
  do not register the memory of received tensors (`cudaHostRegister`), which the client returns to the system
  when it is idle, and which a `Subscriber` maps privately. examples/gpu_copies.py compares the ways to copy.
- A stream for copies, which overlap with the computations of other streams.
- Events. The stream of the model waits for the event of the copy, and the processor waits for it before it
  writes to the buffer again.

A received tensor must live until its bytes are copied. Without a pinned buffer of your own, that is certain
only after the event of a copy with `non_blocking=True`: the client would otherwise write the next tensor into
the memory that the GPU reads. Remove a tensor from its message to free the memory before the answer.

Send `uint8`, and convert to floats on the GPU: this moves a quarter of the bytes. Answer with the result of
``.cpu()``, which waits for the GPU. With several GPUs, start an engine for each, with its own address and
`CUDA_VISIBLE_DEVICES`. CUDA cannot be used in a forked process, so start processes with `spawn`.
"""

from itertools import cycle

import torch

from addresses import ENGINE
from aiotensor import blocking
from messages import Batch, Summary

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
MAX_REQUESTS = 8


class PinnedBuffer:
    """Memory that a GPU can read directly, and the event that tells when it has done so."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into this buffer, once the GPU has read the tensor before it."""
        self.copied.synchronize()
        if self.memory.nbytes < tensor.nbytes:
            self.memory = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned = self.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return pinned.copy_(tensor)


class Uploader:
    """Copies tensors to a GPU, while it computes.

    The tensors may be freed as soon as `upload` returns, and with them the shared memory of their client.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # copies do not wait for the computations of other streams
        self._buffers = cycle([PinnedBuffer(), PinnedBuffer()])  # one is filled while the GPU reads the other

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the GPU, for use in the current stream of this thread."""
        buffer = next(self._buffers)
        pinned = buffer.fill(tensor)
        with torch.cuda.stream(self._stream):
            on_gpu = pinned.to(self._device, non_blocking=True)
            buffer.copied.record()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(buffer.copied)  # the GPU waits for the copy, and this thread does not
        on_gpu.record_stream(computing)  # its memory is not reused before that stream has used it
        return on_gpu


uploader = Uploader(DEVICE) if DEVICE.type == "cuda" else None


@torch.inference_mode()
def model(requests: list[Batch]) -> list[Summary]:
    """Find the mean colour of each frame of several requests."""
    found = []
    for request in requests:
        frames = request.frames if uploader is None else uploader.upload(request.frames)
        found.append(frames.flatten(1, 2).float().mean(dim=1))  # begins to compute, and does not wait
    return [Summary(colours.cpu()) for colours in found]  # waits for the GPU


def main() -> None:
    """Answer requests until Ctrl-C. An error of the model is sent to the clients of its batch."""
    with blocking.MessageServer(ENGINE, Batch) as server:
        print(f"the model runs on {DEVICE}", flush=True)
        print("the engine is ready", flush=True)
        server.serve(model, max_batch=MAX_REQUESTS)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("the engine ends")
