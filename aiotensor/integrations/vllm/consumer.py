"""The hook of vLLM's encoder, which posts the tensors of each message."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

import aiotensor
from aiotensor import blocking
from aiotensor.errors import AioTensorError, UsageError
from aiotensor.integrations.vllm.data import data_of, handle_of
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import SentMessage, abandon_posted, finish_posted, post_in
from aiotensor.types import TensorHandle

__all__ = ["TensorConsumer"]

logger = logger_of("vllm")

R = TypeVar("R")

_Sender: TypeAlias = "aiotensor.TensorSender | blocking.TensorSender"


class TensorConsumer:
    """Send the tensors of encoded messages; the hook `oob_tensor_consumer` of vLLM's ``MsgpackEncoder``.

    All tensors of a message share one permit, and can be received once the message is encoded. The encoder
    does not report the end of a message, so the consumer ends it in one of these ways:

    - in the block of `message`, at the end of the block, which also discards the message after an exception;
    - otherwise in the thread of a running event loop, in its next iteration: encoding does not suspend;
    - otherwise, each tensor is a separate message with a separate permit.

    A tensor that cannot be sent now (no permit, no memory, no receiver, an unsupported tensor) is declined,
    and vLLM serializes it as usual. The first error of each type is logged, and the statistics of the sender
    count all errors by type. A sent tensor must not change until the engine has received it.

    Args:
        senders: an open sender, or one for each engine in the order of their indices. A blocking sender can
            be used in any thread, a sender for asyncio only in its event loop.

    Attributes:
        senders: a list with one sender for each engine.
        declined: the number of declined tensors, by the name of the type of the error.

    Raises:
        ValueError: there is no sender.
    """

    def __init__(self, senders: "_Sender | Sequence[_Sender]") -> None:
        self.senders = list(senders) if isinstance(senders, Sequence) else [senders]
        if not self.senders:
            raise ValueError("a TensorConsumer needs a sender for each engine, got none")
        self.declined: Counter[str] = Counter()
        self._target = 0
        self._message: SentMessage | None = None
        self._is_delimited = False

    def set_target_engine(self, target_engine: int) -> None:
        """Send the tensors of the next messages to another engine, by its index.

        Raises:
            IndexError: there is no sender for this engine.
        """
        if not 0 <= target_engine < len(self.senders):
            raise IndexError(
                f"target_engine must be the index of one of {len(self.senders)} engines, got {target_engine}"
            )
        self.end_message()
        self._target = target_engine

    def new_message(self) -> None:
        """Begin a message. The tensors of earlier messages can still be received."""
        self.end_message()

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Send a tensor without waiting, and return its placeholder; None if vLLM is to serialize it.

        Raises:
            UsageError: the sender belongs to another thread or event loop, or is not open.
        """
        try:
            handle = self._post(tensor)
        except UsageError:
            raise  # otherwise a sender that belongs to another thread would never be noticed
        except (AioTensorError, OSError) as error:
            self._decline(error)
            return None
        return data_of(handle)

    @contextmanager
    def message(self) -> Iterator[None]:
        """End the message that is encoded in the block when the block ends; discard it after an exception."""
        self._is_delimited = True
        try:
            yield
        except BaseException:
            self.discard_message()
            raise
        finally:
            self._is_delimited = False
            self.end_message()

    def end_message(self) -> None:
        """End the message that is being encoded; has no effect if none is."""
        message, self._message = self._message, None
        if message is not None:
            sender = self.senders[self._target]
            _end(sender, partial(finish_posted, _inner(sender), message))

    def discard_message(self) -> None:
        """Discard the message that is being encoded, because it will not be sent."""
        message, self._message = self._message, None
        if message is not None:
            sender = self.senders[self._target]
            _end(sender, partial(abandon_posted, _inner(sender), message))

    def discard(self, data: dict[str, Any]) -> None:
        """Discard the message of a placeholder, because no engine will decode it.

        A message that has already been received is not affected.
        """
        handle = handle_of("", (), data)
        for sender in self.senders:
            if sender.id == handle.sender:
                _end(sender, partial(_inner(sender).discard, handle))

    def _post(self, tensor: torch.Tensor) -> TensorHandle:
        sender = self.senders[self._target]
        if self._is_delimited:
            loop = None
        elif (loop := asyncio._get_running_loop()) is None:
            return sender.post(tensor)
        message, handle = _run(sender, lambda: post_in(_inner(sender), self._message, tensor))
        if self._message is None and loop is not None:
            loop.call_soon(self._iteration_ended, message)
        self._message = message
        return handle

    def _iteration_ended(self, message: SentMessage) -> None:
        """End a message of the last iteration of the event loop, unless it has ended already."""
        if self._message is message:
            self.end_message()

    def _decline(self, error: Exception) -> None:
        name = type(error).__name__
        self.declined[name] += 1
        if self.declined[name] == 1:
            logger.warning(
                "vLLM serializes a tensor: %s (logged once for each kind of error)",
                error,
                extra={"event": "tensor_declined", "error": name, "reason": str(error)},
            )


def _inner(sender: _Sender) -> aiotensor.TensorSender:
    return sender.inner if isinstance(sender, blocking.TensorSender) else sender


def _run(sender: _Sender, function: Callable[[], R]) -> R:
    """Call a function in the event loop of a sender."""
    return sender.call_briefly(function) if isinstance(sender, blocking.TensorSender) else function()


def _end(sender: _Sender, end: Callable[[], None]) -> None:
    """End a message of a sender, unless it has ended because the receiver or the sender is gone."""
    try:
        _run(sender, end)
    except UsageError:
        raise
    except AioTensorError:
        pass  # the message has ended already, and the reason was reported where it ended
