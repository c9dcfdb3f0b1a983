"""Questions of clients and answers of servers, with values that identify them."""

import msgspec
import torch

from verification.chaos.here import token_of
from verification.patterns import pattern

PROBE = -8  # the key of a question that belongs to no order


class Question(msgspec.Struct):
    """One question: the tensors have the patterns from `key` on."""

    key: int
    wish: str
    answer: tuple[int, ...]
    tensors: list[torch.Tensor] = []


class Answer(msgspec.Struct):
    """The answer to the question with this key."""

    key: int
    tensors: list[torch.Tensor] = []


def answer_to(question: Question) -> Answer:
    """Return the answer to a question: its own tensors, or patterns that no question has."""
    if question.wish == "echo":
        return Answer(question.key, question.tensors)
    tensors = [pattern(_answer_token(question.key, i), n) for i, n in enumerate(question.answer)]
    return Answer(question.key, tensors)


def is_answer(answer: Answer, question: Question) -> bool:
    """Return whether an answer is the right one to a question."""
    key, echoes = question.key, question.wish == "echo"
    sizes = [tensor.numel() for tensor in question.tensors] if echoes else [*question.answer]
    tokens = [key + index if echoes else _answer_token(key, index) for index in range(len(sizes))]
    return (
        answer.key == key
        and [tensor.numel() for tensor in answer.tensors] == sizes
        and [token_of(tensor) for tensor in answer.tensors] == tokens
    )


def wrong_with(question: Question) -> str:
    """Return a description of wrong values in a received question, or ""."""
    tokens = [token_of(tensor) for tensor in question.tensors]
    if tokens == [question.key + index for index in range(len(tokens))]:
        return ""
    return f"question {question.key} came with the tensors of {tokens}"


def _answer_token(key: int, index: int) -> int:
    return -(1 << 40) - 8 * key - index
