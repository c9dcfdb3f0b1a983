"""The common parts of all targets: the conversation that an input stands for, and the report of progress."""

import msgspec

from verification.fuzz.choosers import FromBytes
from verification.fuzz.grammar import TO_RECEIVER, conversation
from verification.fuzz.headers import message_parts
from verification.fuzz.steps import Conversation, Step

__all__ = ["TO_DECODER", "Progress", "conversation_of", "link_of", "listener_of"]

# The kind of peer that gets only the parts of a message: its body and its buffers.
TO_DECODER = "decoder"


class Progress(msgspec.Struct):
    """The progress of a target under atheris, which it writes to a file now and then."""

    executions: int = 0
    summary: str = ""


def listener_of(target: str) -> str:
    """Return the kind of peer that a target's conversations are for."""
    kind, _, _ = target.partition(", ")
    return kind


def conversation_of(target: str, data: bytes) -> Conversation:
    """Return the conversation that an input of a target stands for."""
    if target == "decoder":
        return Conversation(TO_RECEIVER, (Step(data.hex()),))
    if target == "messages":
        return Conversation(TO_DECODER, (_message(message_parts(FromBytes(data))), _message([data])))
    return conversation(FromBytes(data), listener_of(target))


def _message(parts: list[bytes]) -> Step:
    body, *buffers = parts
    return Step(body.hex(), parts=tuple(buffer.hex() for buffer in buffers))


def link_of(target: str) -> str:
    """Return the link of a target."""
    _, _, link = target.partition(", ")
    return link or "unix"
