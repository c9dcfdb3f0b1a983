"""Through a chain of three processes: the near process sends, and two others forward each tensor.

The last one sends to the near process, which reads one element. The source is allocated in the contender's
memory, as in the workload `allocated`.
"""

import torch

from bench.contenders.base import Port
from bench.workloads.base import Stage
from bench.workloads.round_trip import near as near
from bench.workloads.round_trip import warm_up


async def far(stage: Stage[Port]) -> None:
    """Send on what arrives."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        await stage.barrier.meet()
        for _ in range(warm_up(spec, size) + spec.effort.trips(size)):
            received: torch.Tensor = await port.receive()
            await port.send(received)
            del received
        await stage.barrier.meet()
