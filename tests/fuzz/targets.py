"""What the targets have in common: what an input means to one, and how it tells what it has done."""

import msgspec

from tests.fuzz.choosers import FromBytes
from tests.fuzz.grammar import TO_RECEIVER, TO_SENDER, conversation
from tests.fuzz.steps import Conversation, Step

__all__ = ["Progress", "conversation_of", "link_of"]


class Progress(msgspec.Struct):
    """What a target under atheris has done, as it writes it down from time to time."""

    executions: int = 0
    summary: str = ""


def conversation_of(target: str, data: bytes) -> Conversation:
    """Say what an input of a target means."""
    if target == "decoder":
        return Conversation(TO_RECEIVER, (Step(data.hex()),))
    return conversation(FromBytes(data), TO_SENDER if target == "sender" else TO_RECEIVER)


def link_of(target: str) -> str:
    """Name the link that a target is reached by."""
    return "queue" if target == "receiver, queue" else "unix"
