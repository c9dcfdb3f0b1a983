"""What a rogue says, step by step; as a value that can be kept in a file."""

from pathlib import Path

import msgspec

__all__ = ["RIGHT", "STAND_IN", "Conversation", "Step", "cases", "keep"]

CASES = Path(__file__).parent / "cases"

# Stands in every record where the sender's id belongs; each conversation gets an id of its own.
STAND_IN = "5ead" * 8

RIGHT = "right"  # the envelope that this record ought to have on a queue


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say one record.

    Attributes:
        record: the bytes, in hexadecimal digits.
        descriptors: what travels beside it, each by the name of its kind; see `speaking.Things`.
        envelope: what stands before it on a queue; see `speaking.OnQueue`.
        connects: say it on a new connection.
        after: how many records of the other side are read before.
        parts: what follows the record in a message that has parts, each in hexadecimal digits.
    """

    record: str
    descriptors: tuple[str, ...] = ()
    envelope: str = RIGHT
    connects: bool = False
    after: int = 0
    parts: tuple[str, ...] = ()

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.record)


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one rogue says to a receiver, or to a sender."""

    to: str
    steps: tuple[Step, ...]


def cases(to: str) -> dict[str, Conversation]:
    """Read the conversations that were found to harm somebody once."""
    found = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Conversation)
        for path in sorted(CASES.glob("*.json"))
    }
    return {name: conversation for name, conversation in found.items() if conversation.to == to}


def keep(name: str, conversation: Conversation) -> Path:
    """Write a conversation down, for a test to replay from now on."""
    path = CASES / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(conversation)) + b"\n")
    return path
