"""What the targets have in common: what an input means to one, and how it tells what it has done."""

import msgspec

from tests.fuzz.choosers import FromBytes
from tests.fuzz.grammar import TO_CLIENT, TO_RECEIVER, TO_SENDER, TO_SERVER, conversation
from tests.fuzz.headers import message_parts
from tests.fuzz.steps import Conversation, Step

__all__ = ["TO_DECODER", "Progress", "conversation_of", "link_of", "listener_of"]

# Who hears only the bytes of a message: its body, and the buffers beside it.
TO_DECODER = "decoder"

_LISTENERS = {"sender": TO_SENDER, "server": TO_SERVER, "client": TO_CLIENT}


class Progress(msgspec.Struct):
    """What a target under atheris has done, as it writes it down from time to time."""

    executions: int = 0
    summary: str = ""


def listener_of(target: str) -> str:
    """Say whom a target's conversations are for."""
    return _LISTENERS.get(target, TO_RECEIVER)


def conversation_of(target: str, data: bytes) -> Conversation:
    """Say what an input of a target means."""
    if target == "decoder":
        return Conversation(TO_RECEIVER, (Step(data.hex()),))
    if target == "messages":
        return Conversation(TO_DECODER, (_message(message_parts(FromBytes(data))), _message([data])))
    return conversation(FromBytes(data), listener_of(target))


def _message(parts: list[bytes]) -> Step:
    body, *buffers = parts
    return Step(body.hex(), parts=tuple(buffer.hex() for buffer in buffers))


def link_of(target: str) -> str:
    """Name the link that a target is reached by."""
    return "queue" if target == "receiver, queue" else "unix"
