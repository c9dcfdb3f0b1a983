"""Functions of a child process with the blocking API, named as in `verification.processes.peers`."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from aiotensor import TensorHandle
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests.blocking.waiting import in_thread
from tests.channel import parties
from tests.channel.parties import Answer, Place, Question
from verification import loops
from verification.patterns import BIG, pattern

__all__ = ["State", "answer", "main"]


@dataclass
class State:
    """The state of the process between calls."""

    endpoint: Endpoint
    stack: ExitStack
    sender: TensorSender = field(init=False)
    receiver: TensorReceiver = field(init=False)
    client: MessageClient[Answer] = field(init=False)
    tensors: list[torch.Tensor] = field(default_factory=list)


def main(endpoint: Endpoint, connection: Connection) -> None:
    torch.set_num_threads(1)
    with loops.complaints() as complaints, ExitStack() as stack:
        state = State(endpoint, stack)
        while (request := _received(connection)) is not None:
            number, work, args, kwargs = request
            try:
                result = work(state, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it is the test's
                connection.send((number, None, error))
            else:
                wrong = AssertionError("\n".join(complaints)) if complaints else None
                connection.send((number, result, wrong))
        state.tensors.clear()


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


def open_sender(state: State, max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30) -> str:
    state.sender = state.stack.enter_context(TensorSender(state.endpoint, max_concurrent_videos, arena_bytes))
    return state.sender.id


def open_receiver(state: State) -> None:
    state.receiver = state.stack.enter_context(TensorReceiver(state.endpoint))


def send_pattern(state: State, seed: int, count: int) -> TensorHandle:
    return state.sender.send(pattern(seed, count))


def send_message(state: State, seed: int, counts: list[int]) -> list[TensorHandle]:
    with state.sender.message() as message:
        return [message.send(pattern(seed + index, count)) for index, count in enumerate(counts)]


def receive_pattern(state: State, handle: TensorHandle, seed: int, *, keep: bool = False) -> bool:
    tensor = state.receiver.receive(handle)
    if keep:
        state.tensors.append(tensor)
    return torch.equal(tensor, pattern(seed, tensor.numel()))


def forget_tensors(state: State) -> None:
    state.tensors.clear()


def close_sender(state: State) -> None:
    state.sender.close()


def close_receiver(state: State) -> None:
    state.receiver.close()


def drain(state: State) -> None:
    state.sender.drain()


# Messages, as in `tests.channel.peers`.


def open_client(state: State, /, place: Place, *, by_receiver: bool = False, **options: Any) -> None:
    """Open a client with a sender, and optionally with a receiver for the tensors of answers."""
    state.sender = state.stack.enter_context(TensorSender(place.tensors, 4, 64 << 20))
    if by_receiver:
        options["receiver"] = state.stack.enter_context(TensorReceiver(place.answers))
    client = MessageClient(place.messages, sender=state.sender, reply_type=Answer, **options)
    state.client = state.stack.enter_context(client)


def open_server(state: State, /, place: Place, *, by_sender: bool = False, **options: Any) -> None:
    """Open a server that answers, optionally with a sender for the tensors of answers."""
    receiver = state.stack.enter_context(TensorReceiver(place.tensors))
    if by_sender:
        options["sender"] = state.stack.enter_context(TensorSender(place.answers))
    server = MessageServer(place.messages, Question, receiver=receiver, **options)
    state.stack.enter_context(server)
    in_thread(lambda: server.serve(answer))


def answer(question: Question) -> Answer:
    """Answer without waiting, like the async handler of the tests of the channel."""
    try:
        parties.answer(question).send(None)
    except StopIteration as done:
        found: Answer = done.value
        return found
    raise AssertionError("it waited")


def ask(state: State, seed: int, count: int = BIG, wish: int = 7) -> bool:
    got = state.client.request(Question(seed, pattern(seed, count), wish=str(wish)))
    return is_right(got, seed, count, wish)


def ask_many(state: State, first: int, count: int, at_once: int) -> int:
    """Ask questions of all sizes, `at_once` at a time, and return the number of right answers."""
    seeds = iter(range(first, first + count))
    asking = [
        in_thread(lambda: sum(ask(state, seed, (3, 2000, BIG)[seed % 3]) for seed in seeds))
        for _ in range(at_once)
    ]
    return sum(one.result() for one in asking)


def is_right(got: Answer, seed: int, count: int, wish: int = 7) -> bool:
    """Return whether an answer contains the sum of its question's pattern, and the requested pattern."""
    return (
        got.seed == seed
        and got.total == int(pattern(seed, count).sum())
        and got.tensor is not None
        and torch.equal(got.tensor, pattern(seed, wish))
    )
