"""The configuration of the plugin by environment variables, which the processes of vLLM inherit."""

import multiprocessing
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from aiotensor import TensorQueue
from aiotensor.errors import UsageError
from aiotensor.transports.endpoints import route_to
from aiotensor.transports.unix import remove_stale

T = TypeVar("T")

_REMOVAL_S: Final = 2.0
_PARTS: Final = ("tensors", "broadcast")
_QUEUE: Final = "AIOTENSOR_VLLM_QUEUE"  # set for children: the name of the engines
_VARIABLES: Final = (
    "AIOTENSOR_VLLM",
    "AIOTENSOR_VLLM_MAX_CONCURRENT_VIDEOS",
    "AIOTENSOR_VLLM_ARENA_BYTES",
    "AIOTENSOR_VLLM_MAX_WAIT_S",
    "AIOTENSOR_VLLM_ADDRESS",
)


class Settings(NamedTuple):
    """The parts of the integration, their limits, and their addresses.

    Attributes:
        parts: the enabled parts: ``tensors``, ``broadcast``, or both.
        max_concurrent_videos: the maximum number of messages in flight from an API server to an engine.
        arena_bytes: the maximum number of bytes of shared memory in use by each API server for each engine,
            including tensors that the engine still uses or caches, and by each engine for its workers.
        max_wait_s: the seconds that the engine waits for a tensor of a request.
        address: the address of the first engine, for `aiotensor top`; None for endpoints without an address.
        queue: the name of the engines without an address.
    """

    parts: frozenset[str] = frozenset()
    max_concurrent_videos: int = 140
    arena_bytes: int = 8 << 30
    max_wait_s: float = 10.0
    address: str | None = None
    queue: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings from the environment.

        Raises:
            ValueError: a variable is unknown or has an invalid value.
        """
        for name in os.environ:
            if name.startswith(_VARIABLES[0]) and name not in (*_VARIABLES, _QUEUE):
                raise ValueError(f"the variable {name} is unknown: use one of {', '.join(_VARIABLES)}")
        parts, videos, arena_bytes, max_wait_s, address = _VARIABLES
        default = cls()
        return cls(
            _parts(parts),
            _positive(videos, int, default.max_concurrent_videos),
            _positive(arena_bytes, int, default.arena_bytes),
            _positive(max_wait_s, float, default.max_wait_s),
            _address(address),
            os.environ.get(_QUEUE, ""),
        )

    def __str__(self) -> str:
        limits = ", ".join(f"{name}={getattr(self, name)}" for name in self._fields[1:-1])
        return f"{' and '.join(sorted(self.parts))}: {limits}"

    def engine_endpoint(self, engine: int) -> TensorQueue | str:
        """Return the endpoint at which an engine receives tensors, the same in all processes of a server."""
        if self.address is None:
            return TensorQueue(f"{self.queue}-{engine}")
        return self._address_of("", engine)

    def workers_endpoint(self, engine: int) -> TensorQueue | str:
        """Return the endpoint at which an engine publishes the tensors for its workers."""
        return TensorQueue() if self.address is None else self._address_of("-workers", engine)

    def _address_of(self, role: str, engine: int) -> str:
        stem, extension = os.path.splitext(self.address or "")
        return f"{stem}{role}{f'-{engine}' if engine else ''}{extension}"


def begin_process(settings: Settings) -> None:
    """In the first process of a server, name its engines, and remove their sockets when the process ends."""
    name = os.environ.get(_QUEUE, "")
    if name and (multiprocessing.parent_process() is not None or name.startswith(f"{os.getpid()}-")):
        return  # inherited from the process that starts the engines, or called again
    name_engines()
    if settings.address is not None:
        Finalize(None, _remove_sockets, (settings.address.removeprefix("unix://"),), exitpriority=0)


def name_engines() -> None:
    """Name the engines of the next server, in the environment of this process and its children."""
    os.environ[_QUEUE] = f"{os.getpid()}-{secrets.token_hex(16)}"


def _remove_sockets(address: str) -> None:
    """Remove the sockets of engines, which vLLM kills; they live for a moment longer than their parent."""
    stem, extension = os.path.splitext(address)
    ours = re.compile(rf"{re.escape(stem)}(-workers)?(-\d+)?{re.escape(extension)}")
    end = time.monotonic() + _REMOVAL_S
    while paths := [str(path) for path in Path(address).parent.glob("*") if ours.fullmatch(str(path))]:
        for path in paths:
            with suppress(UsageError, OSError):
                remove_stale(path)
        if time.monotonic() > end:
            return  # the remaining ones belong to another server
        time.sleep(0.01)


def _parts(name: str) -> frozenset[str]:
    found = [part.strip() for part in os.environ.get(name, "").split(",")]
    for part in found:
        if part not in ("", *_PARTS):
            raise ValueError(f"{name}={part!r} is unknown: set it to {' or '.join(_PARTS)}, or both")
    return frozenset(found) - {""}


def _address(name: str) -> str | None:
    text = os.environ.get(name, "")
    if not text.startswith("unix:") and text:
        raise ValueError(f"{name}={text!r} is not the path of a socket, such as unix:///run/vllm/engine.sock")
    if text:
        route_to(text)  # which raises for an invalid path
    return text or None


def _positive(name: str, kind: Callable[[str], T], default: T) -> T:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = kind(text)
        if value > 0:  # type: ignore[operator]
            return value
    except ValueError:
        pass
    raise ValueError(f"{name}={text!r} is not a positive number: correct it, or unset it to use {default}")
