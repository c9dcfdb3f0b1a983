"""Questions of clients and answers of servers, with values that identify them, and their addresses."""

import os

import msgspec
import torch

from verification.chaos.here import token_of
from verification.patterns import pattern
from verification.processes.peers import State

__all__ = ["PROBE", "Question", "Reply", "answer_to", "is_answer", "messages_at", "name_back", "wrong_with"]

PROBE = -1  # the key of a question that belongs to no order


class Question(msgspec.Struct):
    """One question: the tensors have the patterns from `key` on."""

    key: int
    wish: str
    answer: tuple[int, ...]
    tensors: list[torch.Tensor] = []


class Reply(msgspec.Struct):
    """The answer to the question with this key."""

    key: int
    tensors: list[torch.Tensor] = []


def answer_to(question: Question) -> Reply:
    """Return the answer to a question; its patterns differ from those of all questions."""
    tensors = [pattern(_answer_token(question.key, i), n) for i, n in enumerate(question.answer)]
    return Reply(question.key, tensors)


def is_answer(reply: Reply, question: Question) -> bool:
    """Return whether a reply is the right answer to a question."""
    tokens = [_answer_token(question.key, index) for index in range(len(question.answer))]
    sizes = [tensor.numel() for tensor in reply.tensors]
    return (
        reply.key == question.key
        and sizes == list(question.answer)
        and [token_of(tensor) for tensor in reply.tensors] == tokens
    )


def wrong_with(question: Question) -> str:
    """Return a description of wrong values in a received question, or ""."""
    tokens = [token_of(tensor) for tensor in question.tensors]
    if tokens == [question.key + index for index in range(len(tokens))]:
        return ""
    return f"question {question.key} came with the tensors of {tokens}"


def _answer_token(key: int, index: int) -> int:
    return -(1 << 40) - 8 * key - index


def messages_at(state: State) -> str:
    """Return the address of the server."""
    return f"ipc://{_folder(state)}/m"


def name_back(state: State, slot: int) -> str:
    """Return the address where a client receives the tensors of answers."""
    return f"unix://{_folder(state)}/back-{slot}"


def _folder(state: State) -> str:
    return os.path.dirname(str(state.endpoint).removeprefix("unix://"))
