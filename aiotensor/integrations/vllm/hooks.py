"""The hooks of vLLM's encoder and decoder, which carry the tensors of messages."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import torch

import aiotensor
from aiotensor import blocking
from aiotensor.errors import AioTensorError, ProtocolError, UsageError
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import SentMessage, abandon_posted, finish_posted, post_in
from aiotensor.types import Number, TensorHandle

logger = logger_of("vllm")

R = TypeVar("R")

Sender: TypeAlias = "aiotensor.TensorSender | blocking.TensorSender"


class TensorConsumer:
    """Send the tensors of encoded messages; the hook `oob_tensor_consumer` of vLLM's ``MsgpackEncoder``.

    The encoder does not report the end of a message, so encode each one in a block of `message`. Its tensors
    share one permit, and can be received once the block has ended. Tensors that are encoded outside of such a
    block are declined.

    A tensor is also declined if it cannot be sent now (no permit, no memory, no receiver, an unsupported
    tensor). vLLM then serializes it as usual. The first error of each type is logged, and the statistics of
    the sender count all errors by type. A sent tensor must not change until the engine has received it.

    Args:
        senders: an open sender for each engine, in the order of their indices. A blocking sender can be used
            in any thread, a sender for asyncio only in its event loop.

    Attributes:
        senders: the senders, by the indices of their engines.
        declined: the number of declined tensors, by the name of the type of the error.
    """

    def __init__(self, *senders: Sender) -> None:
        self.senders = dict(enumerate(senders))
        self.declined: Counter[str] = Counter()
        self._engine: int | None = None  # of the message that is being encoded
        self._message: SentMessage | None = None  # which begins with its first tensor

    @contextmanager
    def message(self, engine: int = 0) -> Iterator[None]:
        """Send the tensors that are encoded in the block as one message; discard it after an exception.

        Args:
            engine: the index of the engine that will decode the message.
        """
        self._engine = engine
        try:
            yield
        except BaseException:
            self._end(abandon_posted)
            raise
        else:
            self._end(finish_posted)
        finally:
            self._engine = None

    def new_message(self) -> None:
        """Do nothing; vLLM's encoder calls it at the beginning of a message."""

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Send a tensor without waiting, and return its placeholder; None if vLLM is to serialize it."""
        try:
            if self._engine is None:
                raise UsageError("it was not encoded in a block of `message`")
            sender = self.sender_of(self._engine)
            self._message, handle = _run(sender, partial(post_in, _inner(sender), self._message, tensor))
        except (AioTensorError, OSError) as error:
            self._decline(error)
            return None
        # The message of vLLM itself contains the dtype and the shape.
        return {"sender": handle.sender, "message": handle.message, "tensor": handle.tensor}

    def sender_of(self, engine: int) -> Sender:
        """Return the sender for an engine.

        Raises:
            KeyError: there is no such sender.
        """
        return self.senders[engine]

    def discard(self, data: dict[str, Any]) -> None:
        """Discard the message of a placeholder, because no engine will decode it.

        A message that has already been received is not affected.
        """
        handle = _handle_of("", (), data)
        for sender in self.senders.values():
            if sender.id == handle.sender:
                _run(sender, partial(_inner(sender).discard, handle))

    def _end(self, end: Callable[[aiotensor.TensorSender, SentMessage], None]) -> None:
        message, self._message = self._message, None
        if message is None or self._engine is None:
            return
        sender = self.senders[self._engine]
        with suppress(AioTensorError):  # the message has ended already, and the reason was reported there
            _run(sender, partial(end, _inner(sender), message))

    def _decline(self, error: Exception) -> None:
        name = type(error).__name__
        self.declined[name] += 1
        if self.declined[name] == 1:
            logger.warning(
                "vLLM serializes a tensor: %s (logged once for each kind of error)",
                error,
                extra={"event": "tensor_declined", "error": name, "reason": str(error)},
            )


class TensorProvider:
    """Receive the tensors of decoded messages; the hook `oob_tensor_provider` of vLLM's ``MsgpackDecoder``.

    It can be used in any thread, for messages of any number of senders, in any order. The tensors of a
    message are kept until they are received or it is discarded, even if later messages are decoded first.

    Args:
        receiver: an open receiver, whose `max_wait_s` limits the wait for a tensor.
    """

    def __init__(self, receiver: blocking.TensorReceiver) -> None:
        self._receiver = receiver

    def __call__(self, dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> torch.Tensor:
        """Wait for the tensor of a placeholder, and return it.

        Raises:
            PeerLostError: its sender died before the tensor had arrived.
            DiscardedError: its message was discarded.
            AlreadyTakenError: it was received before.
            WouldBlockError: it did not arrive within the receiver's `max_wait_s`.
            ProtocolError: the placeholder was made by another implementation of vLLM's hooks.
            ClosedError: the receiver was closed.
        """
        return self._receiver.receive(_handle_of(dtype, shape, data))

    def discard(self, data: dict[str, Any]) -> None:
        """Discard the message of a placeholder, because it will not be decoded."""
        self._receiver.discard(_handle_of("", (), data))


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    """The placeholder of a tensor in a message of vLLM."""

    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    message: Number
    tensor: Number


def _handle_of(dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> TensorHandle:
    try:
        names = msgspec.convert(data, _Data)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"this placeholder of a tensor was not created by a TensorConsumer ({error}): use a "
            "TensorConsumer at the encoder"
        ) from error
    return TensorHandle(names.sender, names.message, names.tensor, dtype, tuple(shape), "cpu")


def _inner(sender: Sender) -> aiotensor.TensorSender:
    return sender.inner if isinstance(sender, blocking.TensorSender) else sender


def _run(sender: Sender, function: Callable[[], R]) -> R:
    """Call a function in the event loop of a sender."""
    return sender.call_briefly(function) if isinstance(sender, blocking.TensorSender) else function()
