"""The steps of a rogue's conversation, as a value that can be stored in a file."""

from pathlib import Path

import msgspec

from aiotensor.protocol import network

CASES = Path(__file__).parent / "cases"

# Placeholders in records, which each run of a conversation replaces; they are valid values of the fields.
STAND_IN = "5ead" * 8  # the id of the rogue, a new one in each run
PEER = "5eed" * 8  # the id of the peer
PID = 0x5EAD_5EAD  # the id of the rogue's process
FIRST_NUMBER = 0x2EAD_5EAD_0000_0000  # the first message of the peer on a connection; the next ones follow
FIRST_BLOCK = 0x2EAD_B10C_0000_0000  # the first block of the peer on a connection; the next ones follow
HEARD = 0x2EAD_ACED_0000_0000  # the bytes of steps, and of records, that the rogue has received


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One record of a conversation.

    Attributes:
        record: the bytes, in hexadecimal digits.
        descriptors: the kinds of the descriptors that accompany it; see `things.Things`.
        connects: whether it is sent on a new connection.
        beside: whether it is sent on a further connection, whose answer is awaited, and which stays open.
        after: how many messages of the peer are read before it is sent.
        parts: the buffers beside a body, for decoders only, in hexadecimal digits.
        moves: the messages before the record, over ``tcp://`` only, in hexadecimal digits.
        opening: the first message on a new connection, over ``tcp://`` only; None for the valid one.
    """

    record: str
    descriptors: tuple[str, ...] = ()
    connects: bool = False
    beside: bool = False
    after: int = 0
    parts: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    opening: str | None = None

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.record)

    @property
    def messages(self) -> list[bytes]:
        """The messages of this step between machines."""
        return [*map(bytes.fromhex, self.moves), bytes([network.RECORD]) + self.data]


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All records that one rogue sends to a peer of a role."""

    to: str
    steps: tuple[Step, ...]


def cases(to: str) -> dict[str, Conversation]:
    """Read the recorded cases: conversations that once caused an error in a peer of this role."""
    paths = sorted(CASES.glob("*.json"))
    found = {path.stem: msgspec.json.decode(path.read_bytes(), type=Conversation) for path in paths}
    return {name: conversation for name, conversation in found.items() if conversation.to == to}


def keep(name: str, conversation: Conversation) -> Path:
    """Record a case, which is sent again in every run."""
    path = CASES / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(conversation)) + b"\n")
    return path
