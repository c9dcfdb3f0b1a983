"""Clients take turns at a server, however many messages each has waiting there."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.asked import Asked, Client
from aiotensor.channel.outbox import Outbox
from aiotensor.channel.turns import Turns
from aiotensor.protocol.exchange import VERSION, ClientHello
from aiotensor.protocol.window import Tally
from tests.channel.parties import Answer, Question, place
from verification.waiting import until


def _clients(count: int) -> list[Client]:
    return [
        Client(
            str(number).encode(),
            ClientHello(VERSION, number),
            Tally(1000, 1 << 20),
            Outbox(lambda parts, is_retry: True),
        )
        for number in range(count)
    ]


def _message(client: Client, number: int) -> Asked:
    return Asked(client, number, (), [memoryview(b"")], wants_answer=True)


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
    clients, turns = _clients(4), Turns()
    for number, client in enumerate(arrivals):
        turns.add(_message(clients[client], number))
    taken: list[Asked] = []
    while turns:
        waiting = {asked.client for asked in turns}
        had = Counter(asked.client for asked in taken)
        taken.append(turns.take())
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
    clients, turns = _clients(4), Turns()
    expected: set[Asked] = set()
    last: Asked | None = None
    for number, (step, client) in enumerate(steps):
        if step == "add":
            asked = _message(clients[client], number)
            turns.add(asked)
            expected.add(asked)
        elif step == "take" and turns:
            last = turns.take()
            expected.remove(last)
        elif step == "back" and last is not None:
            turns.put_back(last)
            assert turns.take() is last
            turns.put_back(last)
            expected.add(last)
            last = None
        elif step == "remove" and expected:
            asked = min(expected, key=lambda one: one.number)
            turns.remove(asked)
            turns.remove(asked)
            expected.remove(asked)
        assert set(turns) == expected
        assert len(turns) == len(expected)
        assert bool(turns) == bool(expected)
