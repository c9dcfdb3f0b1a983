"""A rogue client and a rogue server on plain ZeroMQ sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import zmq

from aiotensor import AioTensorError, TensorHandle, TensorSender
from aiotensor.protocol.exchange import VERSION, ClientHello, write
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.headers import SENT_BEFORE
from verification.fuzz.notes import messages_at
from verification.fuzz.steps import STAND_IN, Conversation, Step
from verification.patterns import pattern

_PATIENCE_S = 0.02  # for a reply that may never arrive
_LINGER_MS = 1000


def _parts(step: Step, sender: str) -> list[bytes]:
    said = [step.record, *step.parts]
    return [bytes.fromhex(part).replace(STAND_IN.encode(), sender.encode()) for part in said]


def _names_a_sender(conversation: Conversation) -> bool:
    name = STAND_IN.encode().hex()
    return any(name in part for step in conversation.steps for part in (step.record, *step.parts))


async def read_message(sock: "zmq.Socket[bytes]", within_s: float = _PATIENCE_S) -> list[bytes] | None:
    """Return the next message, or None if none comes soon."""
    ends = asyncio.get_running_loop().time() + within_s
    while True:
        with contextlib.suppress(zmq.Again):
            return sock.recv_multipart(zmq.NOBLOCK)
        if asyncio.get_running_loop().time() > ends:
            return None
        await asyncio.sleep(0.0005)


async def send_message(
    sock: "zmq.Socket[bytes]", parts: Sequence[bytes], goes_on: Callable[[], bool]
) -> bool:
    """Send a message once the socket is writable; return False if the peer is gone or `goes_on` is false."""
    while goes_on():
        try:
            sock.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            await asyncio.sleep(0.0005)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        else:
            return True
    return False


@asynccontextmanager
async def _own_sender(endpoint: Endpoint, conversation: Conversation) -> AsyncIterator[str]:
    """Send the tensors of valid handles, yield the sender's id, and finally discard the remaining ones."""
    if not _names_a_sender(conversation):
        yield STAND_IN
        return
    async with TensorSender(endpoint, 8, 1 << 20) as sender:
        handles: list[TensorHandle] = []
        for tensors in SENT_BEFORE:
            async with sender.message() as message:
                handles += [await message.send(pattern(index, 3)) for index in range(tensors)]
        yield sender.id
        for handle in handles:
            sender.discard(handle)


async def ask_as_client(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: Endpoint, conversation: Conversation
) -> None:
    """Send a whole conversation to the server, over one connection or several."""
    sock: zmq.Socket[bytes] | None = None
    ends = asyncio.get_running_loop().time() + 1.0  # the socket of a disconnected client is never writable
    async with _own_sender(endpoint, conversation) as sender:
        try:
            for step in conversation.steps:
                if sock is None or step.connects:
                    if sock is not None:
                        sock.close(_LINGER_MS)
                    sock = context.socket(zmq.DEALER)
                    sock.connect(messages_at(endpoint))
                if step.after:
                    await read_message(sock)
                if not await send_message(
                    sock, _parts(step, sender), lambda: asyncio.get_running_loop().time() < ends
                ):
                    break
            if sock is not None:
                await read_message(sock)
        finally:
            if sock is not None:
                sock.close(_LINGER_MS)


async def heard_by_server(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: Endpoint) -> None:
    """Wait until the server has accepted a new client, after all earlier ones."""
    with context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(messages_at(endpoint))
        sock.send(write(ClientHello(VERSION, 1)))
        assert await read_message(sock, within_s=20) is not None, "the server accepts no new client"


@asynccontextmanager
async def rogue_server(endpoint: Endpoint) -> AsyncIterator["zmq.Socket[bytes]"]:
    """Listen at the address of a server, and remove the socket file at the end."""
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as sock:
            sock.linger = _LINGER_MS
            sock.router_mandatory = True
            sock.bind(messages_at(endpoint))
            yield sock
    finally:
        context.term()  # the socket's file is gone when this returns


async def answer_as_server(sock: "zmq.Socket[bytes]", endpoint: Endpoint, conversation: Conversation) -> None:
    """Send the replies of a conversation to one client, until one of the two ends it."""
    first = await read_message(sock, within_s=5)
    if first is None:
        return
    client, read = first[0], 0
    async with _own_sender(endpoint, conversation) as sender:
        for step in conversation.steps:
            while read < step.after and await read_message(sock) is not None:
                read += 1
            with contextlib.suppress(AioTensorError):
                if not await send_message(sock, [client, *_parts(step, sender)], lambda: True):
                    return
        await read_message(sock)
