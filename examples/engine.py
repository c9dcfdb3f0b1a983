"""An engine: it owns the model, in a plain thread without an event loop. Start it with any of the servers.

python examples/engine.py
"""

from aiotensor import blocking
from messages import MESSAGES, TENSORS, Batch, Summary


def model(batch: Batch) -> Summary:
    """Find the mean colour of each frame: a model of yours would do more."""
    frames = batch.frames  # in shared memory, not copied
    return Summary(frames.flatten(1, 2).float().mean(dim=1))


def main() -> None:
    """Answer requests until Ctrl-C. Errors of the model are sent to the client, and the engine continues."""
    with (
        blocking.TensorReceiver(TENSORS) as receiver,
        blocking.MessageServer(MESSAGES, Batch, receiver=receiver) as server,
    ):
        print("the engine is ready", flush=True)
        server.serve(model)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("the engine ends")
