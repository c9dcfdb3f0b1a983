"""The messages of honest objects and rogues, and the answers to them."""

import msgspec
import numpy as np
import torch

from aiotensor.channel import MessageClient
from verification.patterns import pattern

# The numbers of honest messages, between those that rogues use.
FIRST_HONEST, LAST_HONEST = 1_100_003, 2_000_003


class Note(msgspec.Struct):
    """A publication, a request or an answer: a number and tensors."""

    number: int
    tensors: list[torch.Tensor] = []
    array: np.ndarray | None = None


def answer_to(note: Note) -> Note:
    """Return a note with a number that follows from that of the request, and with its tensors."""
    return Note(note.number // 2 + 1, note.tensors)  # in range for every number in range


async def ask_rightly(client: MessageClient[Note], number: int, *sizes: int) -> None:
    """Send an honest request, and check the answer."""
    tensors = [pattern(number + index, size) for index, size in enumerate(sizes)]
    note = Note(FIRST_HONEST + number, tensors)
    answer = await client.request(note)
    assert answer.number == answer_to(note).number
    assert len(answer.tensors) == len(tensors)
    assert all(map(torch.equal, answer.tensors, tensors)), f"a wrong answer to note {number}"
