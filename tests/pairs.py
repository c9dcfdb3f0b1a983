"""A sender and a receiver in one process."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import NamedTuple

import pytest

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests import selection
from verification import places

# The links within one machine, for tests of shared memory, and of peers that the kernel identifies.
on_one_machine = pytest.mark.parametrize("link", selection.LOCAL_LINKS, indirect=True)

# The links for tests whose senders need no running receiver.
at_once = pytest.mark.parametrize(
    "link", [link for link in selection.LINKS if places.LINKS[link].connects_at_once], indirect=True
)


class Pair(NamedTuple):
    sender: TensorSender
    receiver: TensorReceiver


class Links:
    """The link of the running test, set by the fixture `link` of conftest.py."""

    current = "queue"


def endpoint(link: str | None = None) -> AbstractContextManager[Endpoint]:
    """Create an endpoint for a sender and a receiver; see `verification.places.endpoint`.

    Args:
        link: the name of the link; None for that of the running test.
    """
    return places.endpoint(link or Links.current)


def is_local() -> bool:
    """Return whether both ends of the link of the running test share memory."""
    return places.LINKS[Links.current].is_local


@asynccontextmanager
async def pair(
    max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30, max_wait_s: float | None = None
) -> AsyncIterator[Pair]:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            TensorSender(place, max_concurrent_videos, arena_bytes, max_wait_s=max_wait_s) as sender,
        ):
            if not places.LINKS[Links.current].connects_at_once:
                await sender.ready()
            yield Pair(sender, receiver)


def beyond(handle: TensorHandle) -> TensorHandle:
    """Return a handle of the same sender for a tensor that has not been sent."""
    return TensorHandle(handle.sender, handle.message + 1000, 0, handle.dtype, handle.shape, handle.device)
