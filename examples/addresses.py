"""The address of the engine, and the keys for an engine on another machine.

The servers and the engine read them from the environment:

- `XDG_RUNTIME_DIR`: the folder of the engine's socket, if all processes run on one machine.
- `ENGINE`: another address of the engine, such as `tcp://engine:7000` if it runs on another machine. The
  engine itself listens there, such as at `tcp://0.0.0.0:7000`.
- `ENGINE_KEYS`: the file with the keys of this side, from `aiotensor keys`. Another machine needs them.
"""

import os
from typing import Any

import msgspec

from two_hosts.keys import ApiKeys, EngineKeys, read

ENGINE = os.environ.get("ENGINE") or f"unix://{os.environ.get('XDG_RUNTIME_DIR', '/tmp')}/example-engine.sock"


def keys_of(kind: type[ApiKeys | EngineKeys]) -> dict[str, Any]:
    """Return the keys of this side as keyword arguments; none on one machine."""
    file = os.environ.get("ENGINE_KEYS")
    return msgspec.structs.asdict(read(file, kind)) if file else {}
