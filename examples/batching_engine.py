"""An engine that processes the requests of several videos at once. Start it with any of the servers.

python examples/batching_engine.py

A GPU processes one batch of 64 frames in less time than four batches of 16. Here, a batch contains the
requests that are ready, and the first of them waits for others for at most 10 ms.
"""

from collections import defaultdict

import torch

from addresses import ENGINE, keys_of
from aiotensor import blocking
from messages import Batch, Summary
from two_hosts.keys import EngineKeys

MAX_REQUESTS = 8
MAX_WAIT_S = 0.01


def model(requests: list[Batch]) -> list[Summary]:
    """Find the mean colour of each frame of several requests; return a summary for each request."""
    by_size: dict[torch.Size, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        by_size[request.frames.shape[1:]].append(number)
    found: dict[int, Summary] = {}
    for numbers in by_size.values():
        parts = [requests[number].frames for number in numbers]
        frames = torch.cat(parts)  # on a GPU: copy each part into one tensor there
        colours = frames.flatten(1, 2).float().mean(dim=1)
        each = torch.split_with_sizes(colours, [len(part) for part in parts])
        found |= dict(zip(numbers, map(Summary, each), strict=True))
    return [found[number] for number in range(len(requests))]


def main() -> None:
    """Answer requests until Ctrl-C. An error of the model is sent to the clients of its batch."""
    with blocking.MessageServer(ENGINE, Batch, **keys_of(EngineKeys)) as server:
        print("the engine is ready", flush=True)
        server.serve(model, max_batch=MAX_REQUESTS, batch_wait_s=MAX_WAIT_S)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("the engine ends")
