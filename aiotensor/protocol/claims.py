"""Which tensors somebody waits for by their handles."""

from typing import NamedTuple

__all__ = ["Claims", "Key"]


class Key(NamedTuple):
    """Name one tensor: the first three fields of its handle."""

    sender: str
    message: int
    tensor: int


class Claims:
    """Count the claims on each tensor; several may wait for one, though only one can get it."""

    __slots__ = ("_by_message",)

    def __init__(self) -> None:
        self._by_message: dict[tuple[str, int], dict[int, int]] = {}  # how many for each tensor

    def __bool__(self) -> bool:
        return bool(self._by_message)

    def __contains__(self, key: Key) -> bool:
        return key.tensor in self._by_message.get((key.sender, key.message), ())

    def add(self, key: Key) -> None:
        """Note one more claim."""
        claims = self._by_message.setdefault((key.sender, key.message), {})
        claims[key.tensor] = claims.get(key.tensor, 0) + 1

    def remove(self, key: Key) -> None:
        """Take one claim back."""
        claims = self._by_message[key.sender, key.message]
        claims[key.tensor] -= 1
        if not claims[key.tensor]:
            del claims[key.tensor]
        if not claims:
            del self._by_message[key.sender, key.message]

    def of_message(self, sender: str, number: int) -> list[Key]:
        """List the tensors of a message that are claimed, those that it does not have among them."""
        return [Key(sender, number, tensor) for tensor in self._by_message.get((sender, number), ())]

    def of_sender(self, sender: str) -> list[Key]:
        """List the tensors of a sender that are claimed."""
        return [
            Key(*message, tensor)
            for message, tensors in self._by_message.items()
            if message[0] == sender
            for tensor in tensors
        ]
