"""The engine: it owns the model, in a plain thread without an event loop.

python -m two_hosts.engine two_hosts/keys/engine.json
"""

import argparse

from aiotensor import blocking
from two_hosts.keys import EngineKeys, read
from two_hosts.messages import PORT, Summary, Video


def model(video: Video) -> Summary:
    """Find the brightness of a video: a model of yours would do more."""
    frames = video.frames  # in memory of this process, where the network has stored them
    return Summary(len(frames), frames[:, ::8, ::8].float().mean().item())


def main(host: str, port: int, keys: EngineKeys) -> None:
    """Answer requests until Ctrl-C. Errors of the model are sent to the client, and the engine continues."""
    with blocking.MessageServer(
        f"tcp://{host}:{port}", Video, secret_key=keys.secret_key, client_keys=keys.client_keys
    ) as server:
        print("the engine is ready", flush=True)
        server.serve(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="two_hosts.engine")
    parser.add_argument("keys", help="the file engine.json")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen at")  # noqa: S104 - with keys
    parser.add_argument("--port", type=int, default=PORT, help="the port to listen at")
    given = parser.parse_args()
    try:
        main(given.host, given.port, read(given.keys, EngineKeys))
    except KeyboardInterrupt:
        print("the engine ends")
