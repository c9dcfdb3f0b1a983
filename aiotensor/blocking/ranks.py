"""Blocking pipes between ranks."""

from typing import Any

import torch

from aiotensor import ranks
from aiotensor.blocking.portal import BlockingObject, parameters_of
from aiotensor.types import PipeStatistics


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
