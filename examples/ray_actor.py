"""A driver and an actor of Ray exchange tensors: calls of the actor carry handles, and no tensor is pickled.

python examples/ray_actor.py

It needs `pip install aiotensor ray`.

- Addresses, handles and `MessageQueue` can be arguments of remote calls. Senders, receivers, clients and
  servers belong to the process that has opened them, so pass an address, and open another object there: in an
  async actor in a method, because `__init__` does not run in its event loop; in a plain actor with the
  classes of `aiotensor.blocking`. Ray copies the bytes of a tensor that is an argument.
- ``unix://`` connects processes on one machine, and containers on it need a common folder for the socket.
  Between machines, use ``tcp://`` addresses with keys.
- When an actor is killed, calls of aiotensor that wait for it raise `PeerLostError` within a second, and Ray
  raises `RayActorError`. An actor with `max_restarts` opens its receiver again at the same address; set
  `max_task_retries`, too, if a method opens it.

With a tensor of 150 MiB, Ray's object store is as fast as aiotensor for NumPy arrays, and takes 35 to 42
times as long for torch tensors, which it pickles unless `RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1`. Use the store
for objects with many readers, and aiotensor for its backpressure, bounded memory and asyncio interface.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aiotensor import TensorHandle, TensorReceiver, TensorSender

CLIPS = 16
SHAPE = (60, 180, 320, 3)  # frames, height, width, channels


class Engine:
    """Owns the model. It runs in another process than the driver, so it opens its own receiver and sender."""

    async def open(self, clips: str, motions: str) -> None:
        """Open both ends. `__init__` cannot do this: it does not run in the event loop of the actor."""
        self._opened = AsyncExitStack()
        self._receiver = await self._opened.enter_async_context(TensorReceiver(clips))
        self._sender = await self._opened.enter_async_context(TensorSender(motions, max_concurrent_videos=4))

    async def motion(self, clip: TensorHandle) -> tuple[float, TensorHandle]:
        """Return the mean difference between the frames of a clip, and the handle of all differences."""
        frames = await self._receiver.receive(clip)  # in shared memory, not copied
        differences = await asyncio.to_thread(_differences, frames)
        return differences.float().mean().item(), await self._sender.send(differences)

    async def close(self) -> None:
        """Close both ends, once the driver has received all tensors."""
        await self._sender.drain()
        await self._opened.aclose()


def _differences(frames: torch.Tensor) -> torch.Tensor:
    """Subtract each frame from the next one: a model of yours would do more."""
    return frames[1:] - frames[:-1]


async def main() -> None:
    """Send clips to the actor, at most 4 at once, and compare its answers with the expected ones."""
    here = ray.get_runtime_context().get_node_id()
    # Only processes on one machine share memory: without this, Ray could start the actor on another one.
    on_this_machine = NodeAffinitySchedulingStrategy(here, soft=False)
    engine = ray.remote(Engine).options(num_cpus=1, scheduling_strategy=on_this_machine).remote()
    with tempfile.TemporaryDirectory(prefix="ray-actor-") as folder:
        clips, motions = f"unix://{folder}/clips", f"unix://{folder}/motions"
        async with (
            TensorReceiver(motions) as receiver,
            TensorSender(clips, max_concurrent_videos=4) as sender,
        ):
            await engine.open.remote(clips, motions)
            results = await asyncio.gather(
                *[exchange(number, engine, sender, receiver) for number in range(CLIPS)]
            )
            await engine.close.remote()
    print(f"{sum(results)} of {CLIPS} clips arrived unchanged in both directions")


async def exchange(
    number: int, engine: ray.actor.ActorHandle, sender: TensorSender, receiver: TensorReceiver
) -> bool:
    """Send a clip whose frames become brighter, and return whether the actor found by how much."""
    clip = torch.arange(SHAPE[0], dtype=torch.uint8).mul(number).view(-1, 1, 1, 1).expand(SHAPE)
    handle = await sender.send(clip)  # waits while 4 clips are in flight
    mean, answer = await engine.motion.remote(handle)
    motion = await receiver.receive(answer)
    return mean == number and bool((motion == number).all())


if __name__ == "__main__":
    ray.init(include_dashboard=False)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
