"""The API server's side of the ZeroMQ socket to the engine."""

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from aiotensor.cli.demo.messages import AnalyseVideo, EngineFailure, EngineReply, VideoAnalysis

__all__ = ["EngineClient", "EngineError"]


class EngineError(Exception):
    """The engine could not answer this request."""


class EngineClient:
    """Ask the engine, any number of questions at a time; the answers come in any order.

    Each worker of the server has one. The engine may start later, and may be another one afterwards; what
    it was asked before it went is answered with `EngineError`.

    Args:
        socket_path: the engine's socket.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[EngineReply]] = {}
        self._requests = msgspec.msgpack.Encoder()
        self._replies = msgspec.msgpack.Decoder(EngineReply)

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"ipc://{self._socket_path}")
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def analyse(self, request: AnalyseVideo) -> VideoAnalysis:
        """Wait for the engine's answer. Cancelling only stops the waiting.

        Raises:
            EngineError: the engine could not answer.
        """
        number = str(next(self._numbers)).encode()
        answered: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            await self._socket.send_multipart([number, self._requests.encode(request)])
            reply = await answered
        finally:
            del self._waiting[number]
        if isinstance(reply, EngineFailure):
            raise EngineError(f"{reply.type_name}: {reply.text}")
        return reply

    async def _read(self) -> None:
        while True:
            number, body = await self._socket.recv_multipart()
            answered = self._waiting.get(number)
            if answered is not None and not answered.done():  # otherwise nobody waits any more
                answered.set_result(self._replies.decode(body))

    async def _watch(self) -> None:
        while True:
            await recv_monitor_message(self._events)
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(EngineError("it ended before it answered"))
