"""The addresses of the engine, and the keys for an engine on another machine.

The servers and the engine read them from the environment:

- `XDG_RUNTIME_DIR`: the folder of the engine's sockets, if all processes run on one machine.
- `ENGINE`: `tcp://` and the host and the port of the engine, if it runs on another machine. The messages use
  the next port. The engine itself listens there, such as at `tcp://0.0.0.0:7000`.
- `ENGINE_KEYS`: the file with the keys of this side, from `aiotensor keys`. Another machine needs them.
"""

import os
from typing import Any

import msgspec

from two_hosts.keys import ApiKeys, EngineKeys, read

_FOLDER = os.environ.get("XDG_RUNTIME_DIR", "/tmp")


def _addresses() -> tuple[str, str]:
    """Return the addresses of the tensors and of the messages."""
    engine = os.environ.get("ENGINE")
    if engine is None:
        return f"unix://{_FOLDER}/example-engine.tensors", f"ipc://{_FOLDER}/example-engine.messages"
    host, _, port = engine.rpartition(":")
    if not (host.startswith("tcp://") and port.isdecimal()):
        raise ValueError(f"ENGINE must be tcp://HOST:PORT, such as tcp://engine:7000, not {engine!r}")
    return engine, f"{host}:{int(port) + 1}"


TENSORS, MESSAGES = _addresses()


def keys_of(kind: type[ApiKeys | EngineKeys]) -> dict[str, Any]:
    """Return the keys of this side as keyword arguments; none on one machine."""
    file = os.environ.get("ENGINE_KEYS")
    return msgspec.structs.asdict(read(file, kind)) if file else {}
