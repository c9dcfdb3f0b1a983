"""Blocking pipes between ranks."""

from typing import Any, Self

import torch

from aiotensor import ranks
from aiotensor.blocking.portal import BlockingObject, parameters_of
from aiotensor.types import PipeStatistics

__all__ = ["KVPipe", "RankPipe"]


class RankPipe(BlockingObject[ranks.RankPipe, PipeStatistics]):
    """Exchange tensors with another rank; open it with ``with``, and share it between threads.

    Arguments and errors are those of `aiotensor.ranks.RankPipe`.
    """

    @parameters_of(ranks.RankPipe)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(ranks.RankPipe(*args, **kwargs))

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.inner.rank

    @property
    def peer(self) -> int:
        """The other rank."""
        return self.inner.peer

    def send(self, tensor: torch.Tensor | None, *, timeout: float | None = None) -> None:
        """Send a tensor or None, and wait until the tensor may be changed.

        After a timeout, the message is not sent.
        """
        self.wait_for(self.inner.send, tensor, timeout=timeout)

    def receive(self, *, copy: bool = False, timeout: float | None = None) -> torch.Tensor | None:
        """Return the next message of the other rank, once it has arrived.

        After a timeout, no message is lost.
        """
        return self.take(None, self.inner.receive, copy=copy, timeout=timeout)

    def drain(self, *, timeout: float | None = None) -> None:
        """Wait until the other rank has received all messages that were sent before this call."""
        self.wait_for(self.inner.drain, timeout=timeout)


class KVPipe:
    """A `RankPipe` with the interface of the pipes with which vLLM transfers key-value caches.

    `send_tensor` raises the errors of sending, and a message that could not be sent does not count towards
    `max_bytes`. Errors are those of `RankPipe`.

    Args:
        pipe: an open pipe, which `close` closes.
    """

    def __init__(self, pipe: RankPipe) -> None:
        self._pipe = pipe

    def send_tensor(self, tensor: torch.Tensor | None) -> None:
        """Send a tensor or None, as `RankPipe.send` does; the tensor may be changed afterwards."""
        self._pipe.send(tensor)

    def recv_tensor(self) -> torch.Tensor | None:
        """Return the next message of the other rank once it has arrived; a tensor has its own memory."""
        return self._pipe.receive(copy=True)

    def close(self) -> None:
        """Close the pipe; the other rank can still receive all messages."""
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
