"""The steps of a rogue's conversation, as a value that can be stored in a file."""

from pathlib import Path

import msgspec

from aiotensor.protocol import network

__all__ = [
    "CASES",
    "FIRST_BLOCK",
    "FIRST_NUMBER",
    "HEARD",
    "PID",
    "PUBLISHER",
    "STAND_IN",
    "Conversation",
    "Step",
    "cases",
    "keep",
]

CASES = Path(__file__).parent / "cases"

# The placeholder of the sender's id in every record; each run of a conversation replaces it with a new id.
STAND_IN = "5ead" * 8

# Further placeholders, for values of the publisher and of the rogue itself: see `subscribing` and `hearing`.
# They are valid values of the fields.
PUBLISHER = "5eed" * 8  # the id of the publisher
PID = 0x5EAD_5EAD  # the id of the rogue's process
FIRST_NUMBER = 0x2EAD_5EAD_0000_0000  # the first publication of a connection; the next ones follow
FIRST_BLOCK = 0x2EAD_B10C_0000_0000  # a block of the first publication; those of the next ones follow
HEARD = 0x2EAD_ACED_0000_0000  # the bytes of steps, and of records, that the rogue has received


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One record of a conversation.

    Attributes:
        record: the bytes, in hexadecimal digits.
        descriptors: the kinds of the descriptors that travel with it; see `things.Things`.
        connects: whether it is sent on a new connection.
        beside: whether it is sent on a further connection, whose answer is awaited, and which stays open.
        after: how many records of the other side are read before it is sent; of a publisher, how many
            publications.
        parts: the further parts of a ZeroMQ message, in hexadecimal digits.
        moves: the messages before the record, over ``tcp://`` only, in hexadecimal digits.
        opening: the first message on a new connection, over ``tcp://`` only; None for the valid one.
        carried: the bytes of a tensor that travel with the record, in hexadecimal digits. Over other links
            the record is not sent.
        is_apart: whether these bytes are the next message.
    """

    record: str
    descriptors: tuple[str, ...] = ()
    connects: bool = False
    beside: bool = False
    after: int = 0
    parts: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    opening: str | None = None
    carried: str | None = None
    is_apart: bool = False

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.record)

    @property
    def messages(self) -> list[bytes]:
        """The messages of this step between machines."""
        before = [*map(bytes.fromhex, self.moves)]
        if self.carried is None:
            return [*before, bytes([network.RECORD]) + self.data]
        head, carried = network.encode_data(self.data), bytes.fromhex(self.carried)
        return [*before, head, carried] if self.is_apart else [*before, head + carried]


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All records that one rogue sends to a peer."""

    to: str
    steps: tuple[Step, ...]


def cases(to: str) -> dict[str, Conversation]:
    """Read the recorded cases: conversations that once caused an error in a peer of this kind."""
    found = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Conversation)
        for path in sorted(CASES.glob("*.json"))
    }
    return {name: conversation for name, conversation in found.items() if conversation.to == to}


def keep(name: str, conversation: Conversation) -> Path:
    """Record a case, which the tests replay from then on."""
    path = CASES / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(conversation)) + b"\n")
    return path
