"""An engine: it owns the model, in a plain thread without an event loop. Start it, and any of the servers.

python examples/engine.py
"""

import torch
from messages import MESSAGES, TENSORS, Batch, Summary

from aiotensor import blocking


def model(frames: torch.Tensor) -> torch.Tensor:
    """Find the mean colour of each frame: a model of yours would do more."""
    return frames.flatten(1, 2).float().mean(dim=1)


def main() -> None:
    """Answer requests until Ctrl-C."""
    with (
        blocking.TensorReceiver(TENSORS) as receiver,
        blocking.MessageServer(MESSAGES, Batch, receiver=receiver) as server,
    ):
        print("the engine is ready", flush=True)
        for request in server:
            try:
                request.reply(Summary(model(request.message.frames)))  # read in shared memory, not copied
            except ValueError as error:  # whatever your model raises for a video that it cannot take
                request.fail(error)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("the engine ends")
