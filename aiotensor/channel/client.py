"""The client: sends messages to servers and returns their answers."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Generic, Self, TypeVar

from aiotensor.channel import options
from aiotensor.channel.memory import MessageMemory
from aiotensor.channel.outgoing_requests import OutgoingRequests
from aiotensor.channel.payloads import drop_answer
from aiotensor.channel.permits import Permit
from aiotensor.channel.remote_server import RemoteServer
from aiotensor.codec import TensorDecoder
from aiotensor.codec.payload import Payload
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import grace_period, instances, seconds, seconds_or_never
from aiotensor.sender import OpenMessage, TensorSender, capacity_of
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.address import is_folder, label_of
from aiotensor.transports.zeromq.addresses import parse
from aiotensor.transports.zeromq.context import begin
from aiotensor.transports.zeromq.keys import connecting_keys
from aiotensor.types import ClientStatistics, CurveKey

__all__ = ["MessageClient", "request_encoded"]

R = TypeVar("R")


class MessageClient(LoopObject, Generic[R]):
    """Send messages that contain tensors to a server, and await its answers.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for the server: messages wait until it has started. After a server is lost, the client connects to
    the next one at that address; requests to the lost server fail with `PeerLostError`.

    With a `sender`, the tensors of a message go through shared memory, as one message of the sender with one
    permit; tensors of a few KiB are part of the encoded message. Without a sender, all tensors are part of
    the message, and ZeroMQ sends large ones without copying them.

    Threads encode and decode large messages. But msgspec holds the GIL, so the event loop waits: decoding
    takes 1 to 16 ms for each MiB of numbers, texts and structs, and up to a second for each MiB of tiny
    lists; encoding takes less than half as long. Put large data into tensors or arrays, which avoids both.

    Args:
        address: the address of the server: ``ipc://`` and an absolute path, ``engine://`` and the folder of
            an engine, or ``tcp://`` with a host and a port; for several servers, a sequence of addresses.
            Host names are resolved in threads, and again every second until a server is found; an unresolved
            name counts as a server that has not started.
        sender: a sender to the receiver of the server. For several servers, a sequence with one sender for
            each server, in the same order. A sender that is not open is opened and closed with this client;
            close an open one after this client. None to send tensors as part of the messages.
        receiver: an open receiver for the tensors of answers, if the server has a sender to it. Do not
            iterate over it.
        reply_type: the type of the answers, as msgspec accepts it; answers are validated against it.
        high_water_mark: the maximum number of messages that ZeroMQ queues to each server and, without
            heartbeats, from each server. While the queue to a server is full, `request` and `send` wait.
        max_part_bytes: the maximum size of a part of an answer in bytes; None for no limit. A part is the
            body, one tensor beside the body, or all small tensors beside the body. The client announces the
            limit, and a request whose answer exceeds it raises `RemoteError`.
        max_body_bytes: the maximum size of the body of an answer in bytes; None for no limit but
            `max_part_bytes`. The body contains everything but tensors and arrays; of these, it contains at
            most 64 KiB in total. The server enforces the limit in the same way.
        heartbeat_interval_s: the time between heartbeats to a server, in seconds.
        heartbeat_timeout_s: the time in seconds without a reply to a heartbeat after which a server is lost.
            On this machine the kernel reports at once when a process ends, so heartbeats are sent only if one
            of these two arguments is given. For other machines the defaults are 0.25 and 0.65: a loss is
            noticed within 1 s, or 1.5 s if packets are lost in one direction only. The largest part of a
            message must be transferred within the timeout: raise it for large tensors on a slow network.
        secret_key: the CURVE secret key of this client, for servers on other machines; from
            `zmq.curve_keypair`.
        server_key: the CURVE public key of the servers.
        max_wait_s: the time in seconds after which a wait for a connection, or for a server to accept the
            message, ends with `WouldBlockError`; it applies to each wait separately. None for no limit. It
            does not limit the wait for an answer.
        grace_s: the time in seconds for which calls may wait for a server that has not been started or was
            lost. After this time without a connection, calls raise `UnavailableError` at once; with 0, they
            never wait for a server. None for no limit but `max_wait_s`.
        linger_s: the maximum time in seconds for which `aclose` waits until messages are sent.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an address is invalid, or is not local and there are no keys, a limit is not positive, or
            the senders are not those of the addresses, one for each.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        sender: TensorSender | Sequence[TensorSender] | None = None,
        receiver: TensorReceiver | None = None,
        reply_type: type[R],
        high_water_mark: int = 16,
        max_part_bytes: int | None = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        heartbeat_interval_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        max_wait_s: float | None = None,
        grace_s: float | None = None,
        linger_s: float = 1.0,
    ) -> None:
        self.affinity = LoopAffinity("MessageClient")
        self._errors = ErrorCounter()
        keys = connecting_keys(secret_key, server_key)
        texts = [address] if isinstance(address, str) else list(address)
        self._addresses = [parse(text, has_keys=bool(keys), is_client=True) for text in texts]
        self._label = ",".join(label_of(address.text) for address in self._addresses)
        self._senders: list[TensorSender | None] = (
            [None]
            if sender is None
            else [*instances("sender", sender, TensorSender, "aiotensor.TensorSender")]
        )
        if sender is None:
            self._senders *= len(texts)
        if not texts or len(self._senders) != len(texts):
            raise ValueError(
                f"got {len(self._senders)} senders and {len(texts)} addresses: pass one sender for each "
                "server, or none; with several addresses, pass a list of senders in the same order"
            )
        for text, one in zip(texts, self._senders, strict=True):
            target = text if one is None else capacity_of(one).endpoint
            if is_folder(text) and is_folder(target) and label_of(text) != target:
                raise ValueError(
                    f"the sender for the server at {text} sends to {target}: pass the senders in the order "
                    "of the addresses, each with the address of its server"
                )
        self._limits = options.part_limits(max_part_bytes, max_body_bytes)
        largest = self._limits.part_bytes
        self._options = {
            **options.limits(
                self._addresses, high_water_mark, largest, heartbeat_interval_s, heartbeat_timeout_s
            ),
            **keys,
        }
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._grace_s = grace_period(grace_s)
        self._linger_s = seconds("linger_s", linger_s)
        if receiver is not None:
            instances("receiver", receiver, TensorReceiver, "aiotensor.TensorReceiver")
        self._receiver = receiver
        self._decoder: TensorDecoder[R] = TensorDecoder(reply_type)
        self._requests: OutgoingRequests[R] | None = None  # None before opening
        self._opened_senders = AsyncExitStack()
        self._counts = new_counts(ClientStatistics)

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            for sender in dict.fromkeys(self._senders):
                if sender is not None and not sender.affinity.was_entered:
                    self._opened_senders.push_async_exit(await sender.__aenter__())
            self.affinity.check()  # another task may have closed it in the meantime
            context = begin()
        except BaseException:
            self.affinity.close()
            await self._opened_senders.aclose()
            raise
        memory = MessageMemory()
        receiver = "" if self._receiver is None else self._receiver.id
        servers = [
            RemoteServer(
                context,
                address,
                self._options,
                receiver,
                self._limits,
                self._max_wait_s,
                self._grace_s,
                partial(drop_answer, memory, self._receiver),
            )
            for address in self._addresses
        ]
        self._requests = OutgoingRequests(
            context,
            dict(zip(servers, self._senders, strict=True)),
            self._receiver,
            self._decoder,
            memory,
            self._max_wait_s,
            self._counts,
        )
        self.affinity.settle(self, self._label)
        return self

    def _opened(self) -> OutgoingRequests[R]:
        if asyncio._get_running_loop() is not self.affinity.open_in:
            self.affinity.check()
        if self._requests is None:
            raise AssertionError("a client that is open has its requests")
        return self._requests

    def permit(self) -> Permit:
        """Return a permit for one request: ``async with client.permit() as permit``.

        Entering the permit waits for one of `max_concurrent_videos` of any server's sender. It also waits for
        a server: without one, it raises the errors of `request`.

        Raises:
            UsageError: this client has no sender, is not open, or belongs to another thread or event loop.
            ClosedError: this client was closed.
        """
        return self._opened().permit(self._errors)

    async def ready(self) -> None:
        """Wait until a server has accepted this client and, with a `sender`, a permit is free.

        Use it in a readiness probe, or before the next upload is read. The call acquires nothing, so other
        calls may use the permit first; `permit` acquires one.

        Waits as `request` does before it sends a message, with the same limits. Cancellation has no side
        effects.

        Raises:
            RefusedError: the server, or the receiver of the sender, refused this client because of a limit or
                its version. The next call tries again.
            PeerLostError: the server or the receiver cannot be reached any more, or broke the protocol.
            AccessDeniedError: the server belongs to another user, or does not accept this client's key.
            WouldBlockError: a wait exceeded the `max_wait_s` of this client or the sender. It is an
                `UnavailableError` if no server is connected.
            UsageError: this client is not open, or belongs to another thread or event loop; or there can be
                no socket at the path of the address.
            ClosedError: this client was closed, perhaps during the call.
        """
        with self._errors:
            await self._opened().ready()

    @property
    def senders(self) -> tuple[TensorSender, ...]:
        """The senders, in the order of the servers; empty if this client has none."""
        return tuple(sender for sender in self._senders if sender is not None)

    async def request(
        self,
        message: object,
        *,
        target: int | None = None,
        inside: OpenMessage | Permit | None = None,
        idempotent: bool = False,
    ) -> R:
        """Send a message, and return the answer to it.

        Args:
            message: a msgspec Struct, a dataclass, a list or a dict, with tensors and arrays anywhere in it.
                Do not change any part of it before the call returns. A large message is encoded in a thread,
                which continues for a moment if the call is cancelled.
            target: the index of the server among several, from 0; by default, the connected server
                with the most free credit. While no server has credit, the message waits for the first one; if
                that server is lost before the message is sent, it waits for the next.
            inside: a permit of this client, for callers that acquire it before they create the tensors, so
                that permits also limit video decoding, for example: ``async with client.permit() as permit:
                ... await client.request(message, inside=permit)``; or an open message of the sender. The
                request completes the permit's message when all tensors are sent, and discards it if the
                request fails after sending a tensor.
            idempotent: whether a server may do the work twice without harm. If the server is lost before it
                has answered, the message is then sent once more, with a new permit: to another server, or to
                the next one at the same address. The message must not change until the call returns.

        Waits for the server, for a permit and memory if the message has tensors, for credit and queue space,
        and for the answer. Cancellation notifies the server, which cancels the task that answers, and
        discards the tensors, which releases their permit and memory. The server may be done by then.

        Raises:
            RemoteError: the server's handler raised an exception, or the server could not decode this
                message or receive its tensors; `type_name` is the type of the error.
            PeerLostError: the server died or closed before it answered, or its handler was cancelled or ended
                by an exception such as `SystemExit`; the server may have done the work.
            RefusedError: the server, or the receiver of the sender, refused this client because of a limit or
                its version. The next call tries again.
            AccessDeniedError: the server belongs to another user, or does not accept this client's key.
            ProtocolError: the answer is not of `reply_type`, or its tensors cannot be received.
            WouldBlockError: all of the sender's memory is held by messages that wait for more of it, or a
                wait exceeded the `max_wait_s` of this client, the sender or the receiver. It is an
                `UnavailableError` if no server is connected.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            TypeError: part of the message cannot be encoded; `TensorEncoder.encode` lists further errors.
            UnsupportedTensorError: a tensor would arrive changed; no permit or memory was used for it.
            TooLargeError: a tensor exceeds the sender's `arena_bytes`, the body exceeds the server's
                `max_body_bytes`, another part exceeds the server's `max_part_bytes`, or there are too many
                tensors; nothing was sent.
            ClosedError: this client was closed, perhaps during the call.
            ValueError: there is no such target, or `inside` is a message of another sender.
        """
        try:
            box = [message]
            del message  # so that only the caller keeps its tensors alive during the wait
            requests = self._opened()
            request = requests.request_repeatable if idempotent else requests.request
            with tracing.Traced("request", self._label):
                answer = await request(box, target, inside)
        except BaseException as error:
            self._errors.add(error)
            self._counts["failures"] += isinstance(error, Exception)
            self._counts["cancelled"] += isinstance(error, asyncio.CancelledError)
            raise
        self._counts["answers"] += 1
        return answer

    async def send(
        self, message: object, *, target: int | None = None, inside: OpenMessage | Permit | None = None
    ) -> None:
        """Send a message without requesting an answer.

        When the call has returned, the caller may change the tensors, but the message may still be lost with
        the server. Arguments, waiting and errors are those of `request`, except for the answer. Cancellation
        discards the message unless it was sent.
        """
        with self._errors:
            box = [message]
            del message
            requests = self._opened()
            with tracing.Traced("send message", self._label):
                await requests.send(box, target, inside)

    def statistics(self) -> ClientStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        requests = self._requests
        servers = [] if requests is None else requests.servers
        return snapshot(
            ClientStatistics,
            self._counts,
            servers=sum(server.session is not None for server in servers),
            in_flight=tuple(server.in_flight for server in servers),
            waiting=0 if requests is None else requests.waiting,
            servers_lost=sum(server.lost for server in servers),
            errors=self._errors.counts(),
            engines=tuple(server.statistics() for server in servers),
        )

    async def aclose(self) -> None:
        """Close the client: pending calls raise `ClosedError`.

        Waits at most `linger_s` seconds until ZeroMQ has transmitted the sent messages. Cancellation ends the
        wait. Closing again has no effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if was_open and self._requests is not None:
            with self.affinity.leaving():
                async with self._opened_senders:
                    await self._requests.close(self._linger_s)

    def _details(self) -> list[str]:
        details = [f"at {self._label}"]
        if self.affinity.is_open and self._requests is not None:
            in_flight = sum(server.in_flight for server in self._requests.servers)
            details.append(f"{in_flight} messages in flight")
        return details


async def request_encoded(client: MessageClient[R], payload: Payload, turn: asyncio.Lock) -> R:
    """Send an encoded message, and return the answer; for `queues`.

    Waiting, cancellation and errors are those of `MessageClient.request`. The payload can be sent again.

    Args:
        client: the client.
        payload: the message.
        turn: held until the message was sent, so that messages are sent in the order of the calls.
    """
    return await client._opened().request_encoded(payload, turn)
