"""A permit that a client acquires for a request before the tensors of the request exist."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from aiotensor.channel.balancer import Balancer, Need
from aiotensor.channel.remote_server import RemoteServer
from aiotensor.errors import UsageError
from aiotensor.sender import OpenMessage, TensorSender
from aiotensor.statistics.counters import ErrorCounter

__all__ = ["Permit", "message_of"]


class Permit:
    """A permit for one request, made by `MessageClient.permit`.

    Acquire it before the tensors of the request exist, so that permits also limit the memory and the
    processor time for making them::

        async with client.permit() as permit:
            answer = await client.request(Video(await decode(file)), inside=permit)

    With several servers, the permit belongs to none of them until `allocate` or `request` places the first
    tensor: only then a server is chosen. If the block ends without a request, the permit is released.
    """

    def __init__(
        self,
        reserve: Callable[[], Awaitable[RemoteServer | None]],
        balancer: Balancer | None,
        sender_of: Callable[[RemoteServer], TensorSender],
        errors: ErrorCounter,
    ) -> None:
        self._reserve = reserve
        self._balancer = balancer
        self._sender_of = sender_of
        self._message: OpenMessage | None = None
        self._errors = errors
        self._is_entered = self._is_reserved = False
        self._choosing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        state = "unbound" if self._is_reserved else "new" if self._message is None else repr(self._message)
        return f"<Permit {state}>"

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise UsageError("this permit was already entered: acquire another with client.permit()")
        self._is_entered = True
        with self._errors:
            server = await self._reserve()
            if server is None:
                self._is_reserved = True
            else:
                await self._begin(server)
        return self

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._is_reserved and self._balancer is not None and not is_finalizing():
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._balancer.cancel_reservation)

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for the request, which is sent without a copy.

        With several servers, the first call chooses the server, and waits until one is available. Arguments,
        waiting and errors are otherwise those of `OpenMessage.allocate`.
        """
        return await (await self._bound()).allocate(shape, dtype)

    async def _bound(self) -> OpenMessage:
        """Choose a server if none is chosen, and return the message of its sender."""
        if self._message is None:
            async with self._choosing:  # for several calls at once
                if self._message is None:
                    if not self._is_reserved or self._balancer is None:
                        raise UsageError("this permit is not in use: `async with client.permit() as permit`")
                    await self._begin(await self._balancer.choose(Need.RESERVED))
                    self._release()
        message = self._message
        if message is None:
            raise AssertionError("a server was chosen")
        return message

    async def _begin(self, server: RemoteServer) -> None:
        message = self._sender_of(server).message()
        await message.__aenter__()
        self._message = message

    def _release(self) -> None:
        if self._is_reserved and self._balancer is not None:
            self._is_reserved = False
            self._balancer.cancel_reservation()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        if self._message is not None:
            await self._message.__aexit__(kind, error, trace)


async def message_of(permit: Permit) -> OpenMessage:
    """Choose a server for a permit, if necessary, and return the message of its sender."""
    return await permit._bound()
