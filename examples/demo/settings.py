"""The settings of the workers, in the environment, since uvicorn passes nothing else to them."""

import os
from typing import Self

import msgspec

__all__ = ["Settings"]

VARIABLE = "AIOTENSOR_DEMO"


class Settings(msgspec.Struct, frozen=True):
    """The settings of all workers.

    Attributes:
        address: the address at which the engine receives requests; None if a queue is used instead.
        workers_socket: the path of the socket to which the workers send their reports.
        supervised: whether a process of uvicorn supervises the workers, and replaces a worker that ended.
        max_concurrent_videos: the number of videos that each worker may decode or send at once.
        arena_bytes: the amount of shared memory that each worker may use at once.
        threads: the number of threads of torch in each process.
    """

    address: str | None
    workers_socket: str
    supervised: bool
    max_concurrent_videos: int
    arena_bytes: int
    threads: int

    def environment(self) -> dict[str, str]:
        """Return an environment variable with the settings."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings from the environment variable.

        Raises:
            LookupError: the variable is not set.
            msgspec.ValidationError: its value is invalid.
        """
        try:
            text = os.environ[VARIABLE]
        except KeyError:
            raise LookupError(f"{VARIABLE} is not set: start the server with `make demo`") from None
        return msgspec.json.decode(text, type=cls)
