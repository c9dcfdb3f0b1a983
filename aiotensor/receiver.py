"""The receiving side: files what arrives, wakes who waits, gives back what was taken."""

import logging
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import anyio.to_thread
import torch

from aiotensor import links, placements
from aiotensor.answers import Answers
from aiotensor.descriptors import close_all
from aiotensor.errors import AioTensorError, ClosedError, PeerLostError, ProtocolError, WouldBlockError
from aiotensor.gates import Waiters
from aiotensor.home import FreedItems, Home
from aiotensor.links.base import ReceiverLink
from aiotensor.protocol.frames import (
    VERSION,
    Bye,
    Discard,
    End,
    Hello,
    Put,
    Welcome,
    decode_to_receiver,
    encode,
)
from aiotensor.protocol.mailbox import Key, Mailbox
from aiotensor.types import Delivery, ReceiverStatistics, TensorHandle, Usage

__all__ = ["TensorReceiver"]

logger = logging.getLogger("aiotensor.receiver")


class _Item(NamedTuple):
    """A tensor that arrived, under the name that its sender gave it."""

    handle: TensorHandle
    tensor: torch.Tensor


class _Lease(NamedTuple):
    """A block that a living tensor pins, and the link to give it back on."""

    link: ReceiverLink
    block: int
    nbytes: int


class TensorReceiver:
    """Receive tensors from the senders of an endpoint, in any order.

    Open it with ``async with``, once, and share it between the tasks of that event loop. An endpoint has
    one receiver and any number of senders.

    A received tensor is a view of shared memory (a small one has memory of its own). It stays valid for
    as long as it or a view of it lives, whatever becomes of its sender or of this receiver; the memory
    goes back to the sender when the last one is freed.

    Args:
        endpoint: where the senders send to: a `TensorQueue`.

    Raises:
        TypeError: it is no endpoint.
    """

    def __init__(self, endpoint: links.Endpoint) -> None:
        self._home = Home("TensorReceiver")
        self._listener = links.listen(endpoint)
        self._mailbox: Mailbox[_Item] = Mailbox()
        self._links: dict[str, ReceiverLink] = {}
        self._waiters: dict[Key, Waiters] = {}
        self._iterators = Waiters()
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0
        self._failure: BaseException | None = None
        self._leased_bytes = self._peak_leased_bytes = 0
        self._senders_lost = self._tensors_taken = self._bytes_taken = 0

    async def __aenter__(self) -> Self:
        self._loop = self._home.enter()
        self._answers = Answers(self._loop)
        self._freed: FreedItems[int] = FreedItems(self._loop, self._leases_ended)
        try:
            self._listener.open(self)
        except BaseException:
            self._home.is_closed = True
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def receive(self, handle: TensorHandle, *, copy: bool = False) -> torch.Tensor:
        """Return the tensor that a handle names, once it has arrived.

        Args:
            handle: from the sender's `send`; it may come here before the tensor, or before its sender.
            copy: return a copy with memory of its own, made in a worker thread, so that the sender gets
                its shared memory back at once.

        Waits until the whole message of the tensor has arrived. Cancelling leaves the tensor claimable,
        also in the middle of the copy.

        Raises:
            AlreadyTakenError: it was received before, or somebody else receives it now.
            DiscardedError: its message was discarded, or its sender closed without sending it.
            PeerLostError: its sender died or broke the link; `pid` says which.
            ClosedError: this receiver was closed, perhaps while waiting.
        """
        self._home.check()
        key = _key(handle)
        self._mailbox.claim(key)
        try:
            item = await self._hold(key)
            if not copy:
                return self._take(key, item)
            try:
                # Cancelled, the thread ends a copy that nobody wants; until then it pins the block.
                tensor = await anyio.to_thread.run_sync(_copy, item.tensor)
            except BaseException:
                self._wake(self._mailbox.put_back(key))
                raise
            self._take(key, item)
            return tensor
        finally:
            self._mailbox.unclaim(key)
            self._wake_iterators()  # it may be theirs now

    def receive_nowait(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor that a handle names if it is here.

        Errors are those of `receive`.

        Raises:
            WouldBlockError: it has not arrived.
        """
        self._home.check()
        key = _key(handle)
        item = self._mailbox.hold(key)
        if item is None:
            self._raise_if_failed()
            raise WouldBlockError(
                f"tensor {key.tensor} of message {key.message} of sender {key.sender} has not arrived",
                messages=Usage(requested=1),
            )
        return self._take(key, item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """Return the next tensor in the order of arrival, of those that nobody awaits by handle.

        Cancelling loses nothing. Ends when this receiver is closed.
        """
        if self._home.is_closed:
            raise StopAsyncIteration
        self._home.check()
        while (key := self._mailbox.next_unclaimed()) is None:
            self._raise_if_failed()
            await self._iterators.wait()
            if self._home.is_closed:
                raise StopAsyncIteration
        item = self._mailbox.hold(key)
        if item is None:
            raise AssertionError("an arrival was gone between two lines without an await")
        return Delivery(handle=item.handle, tensor=self._take(key, item))

    def discard(self, handle: TensorHandle) -> None:
        """Drop the whole message of a handle, because nobody wants it any more.

        Its permit goes back to the sender at once, its memory with it. One that has not arrived is dropped
        when it does. What was taken stays valid. Whoever waits for the message gets `DiscardedError`.
        """
        self._home.check()
        key = _key(handle)
        had_arrived, keys = self._mailbox.discard(key.sender, key.message)
        link = self._links.get(key.sender)
        if had_arrived and link is not None:
            self._answers.discarded(link, key.message)
        self._wake(keys)

    def statistics(self) -> ReceiverStatistics:
        """Return what is held and what was done; also after closing."""
        self._home.check_place()
        unclaimed = [item.tensor.nbytes for item in self._mailbox.unclaimed()]
        return ReceiverStatistics(
            senders=len(self._links),
            senders_lost=self._senders_lost,
            waiting=sum(map(len, self._waiters.values())) + len(self._iterators),
            unclaimed_tensors=len(unclaimed),
            unclaimed_bytes=sum(unclaimed),
            leases=len(self._leases),
            leased_bytes=self._leased_bytes,
            peak_leased_bytes=self._peak_leased_bytes,
            tensors_taken=self._tensors_taken,
            bytes_taken=self._bytes_taken,
            messages_discarded=self._mailbox.messages_discarded,
        )

    async def aclose(self) -> None:
        """Close: senders get `PeerLostError`, waiters here `ClosedError`, iterations end.

        What was received stays valid; what was not taken is dropped. Waits until the links have taken what
        the senders are to be told. Cancelling closes at once, and a sender may then take for lost what was
        taken. Closing again does nothing.
        """
        self._home.check_place()
        was_open = self._home.is_open
        self._home.is_closed = True
        if not was_open:
            return
        self._answers.flush()
        for link in self._links.values():
            link.write(encode(Bye()))
        farewells = list(self._links.values())
        self._links.clear()
        self._mailbox.clear()
        self._wake_all()
        try:
            for link in farewells:
                await link.flush()
        finally:
            await self._listener.close()

    # Taking

    async def _hold(self, key: Key) -> _Item:
        """Wait for a tensor, and reserve it."""
        while (item := self._mailbox.hold(key)) is None:
            self._raise_if_failed()
            waiters = self._waiters.setdefault(key, Waiters())
            try:
                await waiters.wait()
            finally:
                if not waiters and self._waiters.get(key) is waiters:
                    del self._waiters[key]
            if self._home.is_closed:
                raise ClosedError("this TensorReceiver was closed")
        return item

    def _take(self, key: Key, item: _Item) -> torch.Tensor:
        if self._mailbox.finish(key):
            link = self._links.get(key.sender)
            if link is not None:
                self._answers.taken(link, key.message)
        self._tensors_taken += 1
        self._bytes_taken += item.tensor.nbytes
        return item.tensor

    def _wake(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in self._waiters:
                self._waiters[key].wake()
        self._wake_iterators()

    def _wake_iterators(self) -> None:
        if self._iterators and self._mailbox.next_unclaimed() is not None:
            self._iterators.wake()

    def _wake_all(self) -> None:
        for line in self._waiters.values():
            line.wake()
        self._iterators.wake()

    # What senders say

    def frame_arrived(self, link: ReceiverLink, data: bytes, descriptors: Sequence[int]) -> None:
        """Take a frame from a sender. For the link, not for callers."""
        try:
            try:
                frame = decode_to_receiver(data)
            except ProtocolError:
                close_all(descriptors)
                raise
            if isinstance(frame, Put):
                self._file(link, frame, descriptors)
                return
            close_all(descriptors)
            match frame:
                case Hello():
                    link.write(encode(Welcome(VERSION, os.getpid())))  # first: it says what differs
                    if frame.version != VERSION:
                        raise ProtocolError(
                            f"it speaks version {frame.version}, this receiver speaks {VERSION}"
                        )
                    self._mailbox.join(link.sender, frame.pid, frame.max_concurrent_videos)
                    self._links[link.sender] = link
                case End():
                    self._wake(self._mailbox.end(link.sender, frame.message, frame.count))
                case Discard():
                    self._wake(self._mailbox.withdraw(link.sender, frame.message))
                case Bye():
                    keys = self._mailbox.leave(link.sender)
                    self._links.pop(link.sender, None)
                    link.close()
                    self._wake(keys)
        except ProtocolError as error:
            logger.error("sender %s broke the protocol, its link is closed: %s", link.sender, str(error))
            link.close()
            self._lose(link, error)

    def link_lost(self, link: ReceiverLink, reason: str) -> None:
        """Note that a sender is gone. For the link, not for callers."""
        self._lose(link, PeerLostError(reason))

    def listener_failed(self, error: BaseException) -> None:
        """Note that nothing more will arrive. For the link, not for callers."""
        logger.critical("reading from the senders failed, nothing more will arrive", exc_info=error)
        self._failure = error
        self._wake_all()

    def _file(self, link: ReceiverLink, put: Put, descriptors: Sequence[int]) -> None:
        """Open a tensor that arrived, and keep it until somebody takes it."""
        try:
            is_expected = self._mailbox.expects(link.sender, put.message)
        except ProtocolError:
            close_all(descriptors)
            raise
        if not is_expected:
            close_all(descriptors)
            self._refuse(link, put)
            return
        try:
            opened = placements.open_tensor(put.placement, put.payload, descriptors, put.dtype, put.shape)
        except OSError as error:
            logger.error(
                "a tensor of sender %s cannot be opened, it is discarded: %s", link.sender, str(error)
            )
            _, keys = self._mailbox.discard(link.sender, put.message)
            self._refuse(link, put)
            self._wake(keys)
            return
        tensor = _with_gradient_flags(opened.tensor, put)
        if put.block is not None:
            self._lease(_Lease(link, put.block, tensor.nbytes), opened.owner)
        handle = TensorHandle(link.sender, put.message, put.tensor, put.dtype, put.shape, put.device)
        self._mailbox.put(_key(handle), _Item(handle, tensor))
        if put.last:
            self._wake(self._mailbox.end(link.sender, put.message, put.tensor + 1))

    def _refuse(self, link: ReceiverLink, put: Put) -> None:
        """Give back what came with a tensor that is not kept."""
        self._answers.discarded(link, put.message)
        if put.block is not None:
            self._answers.released(link, put.block)

    def _lease(self, lease: _Lease, owner: object) -> None:
        number = self._next_lease
        self._next_lease += 1
        self._leases[number] = lease
        self._leased_bytes += lease.nbytes
        self._peak_leased_bytes = max(self._peak_leased_bytes, self._leased_bytes)
        finalizer = weakref.finalize(owner, self._freed, number)
        finalizer.atexit = False  # at exit the kernel frees everything

    def _leases_ended(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            lease = self._leases.pop(number)
            self._leased_bytes -= lease.nbytes
            if lease.link.sender in self._links:
                self._answers.released(lease.link, lease.block)

    def _lose(self, link: ReceiverLink, error: AioTensorError) -> None:
        if self._home.is_closed:
            return
        self._links.pop(link.sender, None)
        self._answers.forget(link)
        self._senders_lost += 1
        self._wake(self._mailbox.lose(link.sender, error))

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise PeerLostError(f"nothing more will arrive: {self._failure}") from self._failure


def _key(handle: TensorHandle) -> Key:
    if not isinstance(handle, TensorHandle):
        raise TypeError(
            f"a handle is what `send` returned, an aiotensor.TensorHandle, got {type(handle).__name__!r}: "
            "decode it with its type, for example msgspec.msgpack.decode(data, type=aiotensor.TensorHandle)"
        )
    if handle.message < 0 or handle.tensor < 0:
        raise ValueError(f"no sender made this handle, its numbers are negative: {handle}")
    return Key(handle.sender, handle.message, handle.tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = placements.copy_of(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def _with_gradient_flags(tensor: torch.Tensor, put: Put) -> torch.Tensor:
    if put.requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ProtocolError(f"it sent a tensor of dtype {put.dtype} that requires a gradient")
    if put.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=put.requires_grad)
    return tensor.requires_grad_(put.requires_grad)
