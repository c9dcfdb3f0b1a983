"""Clients take turns at a server, however many messages each has waiting there."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.client_session import ClientSession, IncomingRequest
from aiotensor.channel.incoming_requests import FairQueue
from aiotensor.protocol.exchange import Ask
from aiotensor.protocol.parts import PartLimits
from aiotensor.protocol.server import ClientLimits, ServerConnection
from tests.channel.parties import Answer, Question, place
from verification.waiting import until


def _clients(count: int) -> list[ClientSession]:
    limits = ClientLimits(None, 1000, 1 << 20, PartLimits())
    return [
        ClientSession(
            str(number).encode(),
            ServerConnection(limits),
            lambda parts, is_retry: True,
            set(),
            lambda client: None,
        )
        for number in range(count)
    ]


def _message(client: ClientSession, number: int) -> IncomingRequest:
    return client.add(Ask(number, None), [memoryview(b"")])


async def test_a_client_with_one_message_does_not_wait_for_all_of_a_client_with_many() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_waiting=64) as server,
            MessageClient(here.messages, reply_type=Answer) as greedy,
            MessageClient(here.messages, reply_type=Answer) as polite,
        ):
            for seed in range(50):
                await greedy.send(Question(seed))
            for seed in range(100, 103):
                await polite.send(Question(seed))
            await until(lambda: server.statistics().waiting == 53)
            order = [(await anext(server)).message.seed for _ in range(53)]
    assert max(order.index(seed) for seed in range(100, 103)) < 6
    assert [seed for seed in order if seed < 100] == list(range(50))
    assert [seed for seed in order if seed >= 100] == [100, 101, 102]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_no_client_gets_a_second_turn_while_another_waits_for_its_first(arrivals: list[int]) -> None:
    clients, queue = _clients(4), FairQueue()
    for number, client in enumerate(arrivals):
        queue.add(_message(clients[client], number))
    taken: list[IncomingRequest] = []
    while queue:
        waiting = {asked.client for asked in queue}
        had = Counter(asked.client for asked in taken)
        taken.append(queue.take())
        assert had[taken[-1].client] == min(had[client] for client in waiting)
    for each in clients:
        numbers = [asked.number for asked in taken if asked.client is each]
        assert numbers == sorted(numbers)
    assert len(taken) == len(arrivals)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "take", "back", "remove"]), st.integers(0, 3)), max_size=80)
)
def test_no_message_is_lost_or_taken_twice_whatever_is_taken_put_back_or_removed(
    steps: list[tuple[str, int]],
) -> None:
    clients, queue = _clients(4), FairQueue()
    expected: set[IncomingRequest] = set()
    last: IncomingRequest | None = None
    for number, (step, client) in enumerate(steps):
        if step == "add":
            asked = _message(clients[client], number)
            queue.add(asked)
            expected.add(asked)
        elif step == "take" and queue:
            last = queue.take()
            expected.remove(last)
        elif step == "back" and last is not None:
            queue.put_back(last)
            assert queue.take() is last
            queue.put_back(last)
            expected.add(last)
            last = None
        elif step == "remove" and expected:
            asked = min(expected, key=lambda one: one.number)
            queue.remove(asked)
            queue.remove(asked)
            expected.remove(asked)
        assert set(queue) == expected
        assert len(queue) == len(expected)
        assert bool(queue) == bool(expected)
