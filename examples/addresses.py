"""The addresses of the engine, and the keys for an engine on another machine.

The servers and the engine read them from the environment:

- `XDG_RUNTIME_DIR`: the folder of the engine's sockets, if all processes run on one machine.
- `ENGINE`: `tcp://` and the host and the port of the engine, if it runs on another machine. The messages use
  the next port. The engine itself listens there, such as at `tcp://0.0.0.0:7000`.
- `ENGINE_KEYS`: the file with the keys of this side, from `python -m two_hosts.keys`. Another machine
  needs them.
"""

import os
from typing import Any

import msgspec

from two_hosts.keys import ApiKeys, EngineKeys, read

_FOLDER = os.environ.get("XDG_RUNTIME_DIR", "/tmp")

TENSORS = os.environ.get("ENGINE", f"unix://{_FOLDER}/example-engine.tensors")


def _next_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


MESSAGES = _next_port(TENSORS) if TENSORS.startswith("tcp:") else f"ipc://{_FOLDER}/example-engine.messages"


def keys_of(kind: type[ApiKeys | EngineKeys]) -> dict[str, Any]:
    """Return the keys of this side as keyword arguments; none on one machine."""
    file = os.environ.get("ENGINE_KEYS")
    return msgspec.structs.asdict(read(file, kind)) if file else {}
