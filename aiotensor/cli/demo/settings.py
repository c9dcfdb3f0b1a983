"""What a worker of the API server must know. It travels in the environment: uvicorn hands nothing else on."""

import os
from typing import Self

import msgspec

__all__ = ["Settings"]

VARIABLE = "AIOTENSOR_DEMO"


class Settings(msgspec.Struct, frozen=True):
    """The same for every worker.

    Attributes:
        address: where the engine receives tensors; None if a queue was handed over instead.
        engine_address: where the engine takes requests.
        workers_socket: the path at which the demo hears of its workers.
        supervised: whether uvicorn watches over the workers, and starts another for one that ended.
        max_concurrent_videos: how many videos each worker may decode or have on their way at once.
        arena_bytes: how much shared memory each worker may use at once.
        threads: how many threads torch may use in each process.
    """

    address: str | None
    engine_address: str
    workers_socket: str
    supervised: bool
    max_concurrent_videos: int
    arena_bytes: int
    threads: int

    def environment(self) -> dict[str, str]:
        """Return the environment variable that carries them."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> Self:
        """Read them back.

        Raises:
            LookupError: the variable is not set.
            msgspec.ValidationError: it holds something else.
        """
        try:
            text = os.environ[VARIABLE]
        except KeyError:
            raise LookupError(f"{VARIABLE} is not set: start the server by `aiotensor demo`") from None
        return msgspec.json.decode(text, type=cls)
