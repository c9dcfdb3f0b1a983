"""Ray's object store: arrays are put into it, and references to them go through Ray's own queue.

The near process starts a cluster on this machine, the other joins it with the token that was made for this
one run. The queue is an actor, so that each tensor costs calls to a third process; at large sizes the cost of
the store dominates.
"""

import os
import secrets
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.contenders.base import Layout

_STORE_BYTES = 2 << 30
_QUIET = {"namespace": "bench", "log_to_driver": False, "logging_level": "ERROR"}


class StorePort:
    overlaps = False

    def __init__(self, ray: Any, outgoing: Any, incoming: Any) -> None:
        self._ray = ray
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, tensor: torch.Tensor) -> None:
        # In a list: a bare reference would be resolved, and its bytes would pass through the queue.
        self._outgoing.put([self._ray.put(tensor.numpy())])

    async def receive(self) -> torch.Tensor:
        (reference,) = self._incoming.get()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that arrays in the store cannot be written to
            return torch.from_numpy(self._ray.get(reference))


@dataclass(frozen=True)
class StoreSide:
    address: str
    token: str
    outgoing: bytes
    incoming: bytes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[StorePort]:
        ray = _ray(self.token)
        if not ray.is_initialized():
            ray.init(self.address, **_QUIET)
        outgoing, incoming = (ray.cloudpickle.loads(queue) for queue in (self.outgoing, self.incoming))
        try:
            yield StorePort(ray, outgoing, incoming)
        finally:
            ray.shutdown()


def connect(layout: Layout) -> tuple[list[StoreSide], StoreSide]:
    token = secrets.token_hex(32)
    ray = _ray(token)
    context = ray.init(num_cpus=1, include_dashboard=False, object_store_memory=_STORE_BYTES, **_QUIET)
    there, back = (
        ray.cloudpickle.dumps(ray.util.queue.Queue(maxsize=layout.depth, actor_options={"num_cpus": 0}))
        for _ in range(2)
    )
    address = context.address_info["address"]
    return [StoreSide(address, token, there, back)], StoreSide(address, token, back, there)


def _ray(token: str) -> Any:
    # Ray reads these when it is imported. The token is for this cluster alone, and is written to no file.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    import ray.util.queue

    return ray
