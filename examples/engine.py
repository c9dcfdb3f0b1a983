"""An engine: it owns the model, in a plain thread without an event loop. Start it with any of the servers.

python examples/engine.py

With the environment variable `METRICS_PORT`, it answers Prometheus at this port, once it is ready. This needs
`pip install 'aiotensor[prometheus]'`.
"""

import logging
import os
import signal
import sys

from addresses import ENGINE, keys_of
from aiotensor import blocking
from messages import Batch, Summary
from two_hosts.keys import EngineKeys


def model(batch: Batch) -> Summary:
    """Find the mean colour of each frame: a model of yours would do more."""
    frames = batch.frames  # in shared memory, not copied
    return Summary(frames.flatten(1, 2).float().mean(dim=1))


def serve_metrics(port: int) -> None:
    """Answer Prometheus in a thread."""
    import prometheus_client

    from aiotensor.integrations.prometheus import AioTensorCollector

    prometheus_client.REGISTRY.register(AioTensorCollector())
    prometheus_client.start_http_server(port)


def main() -> None:
    """Answer requests until Ctrl-C. Errors of the model are sent to the client, and the engine continues."""
    logging.basicConfig(level=logging.INFO)
    with blocking.MessageServer(ENGINE, Batch, **keys_of(EngineKeys)) as server:
        if port := os.environ.get("METRICS_PORT"):
            serve_metrics(int(port))
        print("the engine is ready", flush=True)
        server.serve(model)


if __name__ == "__main__":
    # In a container, the first process ignores SIGTERM unless it handles it. SystemExit lets the block above
    # close the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        main()
    except KeyboardInterrupt:
        print("the engine ends")
