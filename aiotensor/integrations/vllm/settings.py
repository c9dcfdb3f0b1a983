"""The configuration of the plugin by environment variables, which the processes of vLLM inherit."""

import os
from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

__all__ = ["Settings", "modes"]

T = TypeVar("T")

_MODES = ("tensors", "broadcast")


def modes() -> frozenset[str]:
    """Return the parts of the integration that ``AIOTENSOR_VLLM`` lists, separated by commas.

    Raises:
        ValueError: the variable contains an unknown name.
    """
    names = [name.strip() for name in os.environ.get("AIOTENSOR_VLLM", "").split(",")]
    for name in names:
        if name not in ("", *_MODES):
            raise ValueError(f"AIOTENSOR_VLLM={name!r} is unknown: set it to {' or '.join(_MODES)}, or both")
    return frozenset(names) - {""}


class Settings(NamedTuple):
    """The limits of the integration, and the address of the receiver.

    Attributes:
        max_concurrent_videos: the maximum number of messages in flight of each API server.
        arena_bytes: the maximum number of bytes of shared memory in use by each API server, including tensors
            that the engine still uses or caches, and by each broadcast queue.
        max_wait_s: the seconds that the engine waits for a tensor of a request.
        address: the address of the receiver, for `aiotensor top`; None for an endpoint without an address.
    """

    max_concurrent_videos: int = 140
    arena_bytes: int = 8 << 30
    max_wait_s: float = 10.0
    address: str | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings from the environment.

        Raises:
            ValueError: a variable is not a positive number.
        """
        default = cls()
        return cls(
            _number("AIOTENSOR_VLLM_MAX_CONCURRENT_VIDEOS", int, default.max_concurrent_videos),
            _number("AIOTENSOR_VLLM_ARENA_BYTES", int, default.arena_bytes),
            _number("AIOTENSOR_VLLM_MAX_WAIT_S", float, default.max_wait_s),
            os.environ.get("AIOTENSOR_VLLM_ADDRESS") or None,
        )


def _number(name: str, kind: Callable[[str], T], default: T) -> T:
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
