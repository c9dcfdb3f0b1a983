"""A client in a thread, and a server in another process, with either API."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import torch

from aiotensor import PeerLostError, RemoteError, TooLargeError, UnsupportedTensorError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.others import APIS, Other, other
from tests.blocking.waiting import in_thread, until
from tests.blocking.works import is_right
from tests.channel import parties
from tests.channel.parties import Answer, Place, Question
from verification.patterns import BIG, pattern


class Asking(NamedTuple):
    client: MessageClient[Answer]
    sender: TensorSender

    def is_settled(self) -> bool:
        """Return whether nothing is in flight, and all resources of messages were released."""
        seen = self.sender.statistics()
        return not (seen.in_flight or seen.bytes_in_use or any(self.client.statistics().in_flight))


@contextmanager
def asking(place: Place, max_concurrent_videos: int = 8) -> Iterator[Asking]:
    with (
        TensorSender(place.tensors, max_concurrent_videos, 64 << 20) as sender,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
    ):
        yield Asking(client, sender)


@pytest.mark.parametrize("count", [3, 2000, BIG], ids=["small", "middling", "large"])
def test_a_request_is_answered_with_its_tensors_in_place(count: int, stranger: Other, place: Place) -> None:
    with asking(place) as ends:
        stranger.call("open_server", place)
        question = Question(7, pattern(7, count), {"a": [pattern(1, 5), pattern(2, count)]}, wish=str(count))
        got = ends.client.request(question, timeout=30)
        assert got.seed == 7
        assert got.total == int(pattern(7, count).sum() + pattern(1, 5).sum() + pattern(2, count).sum())
        assert got.tensor is not None
        assert torch.equal(got.tensor, pattern(7, count))
        until(ends.is_settled)
    seen = ends.client.statistics()
    assert (seen.messages_sent, seen.answers, seen.failures, seen.in_flight) == (1, 1, 0, (0,))


def test_without_a_sender_tensors_are_part_of_the_message(stranger: Other, place: Place) -> None:
    with MessageClient(place.messages, reply_type=Answer) as client:
        stranger.call("open_server", place)
        tensor = pattern(3, BIG)
        got = client.request(Question(3, tensor, wish="7"))
        assert is_right(got, 3, BIG)
        client.send(Question(3, tensor))
        tensor.zero_()  # it was read by then
        assert client.request(Question(4, wish="7")).seed == 4
    assert client.statistics().messages_sent == 3


def test_tensors_of_replies_arrive_at_the_receiver(place: Place) -> None:
    with (
        TensorReceiver(place.answers) as receiver,
        TensorSender(place.tensors) as sender,
        MessageClient(place.messages, sender=sender, receiver=receiver, reply_type=Answer) as client,
        other("blocking", place.tensors) as engine,
    ):
        engine.call("open_server", place, by_sender=True)
        got = client.request(Question(3, pattern(3, BIG), wish=str(BIG)))
        assert receiver.statistics().leases == 1
        assert got.tensor is not None
        assert torch.equal(got.tensor, pattern(3, BIG))
        del got
        until(lambda: receiver.statistics().leases == 0)


def test_messages_without_a_reply_are_sent(stranger: Other, place: Place) -> None:
    with asking(place) as ends:
        stranger.call("open_server", place)
        for seed in range(3):
            ends.client.send(Question(seed, pattern(seed, BIG)), timeout=30)
        until(ends.is_settled)
        assert ends.client.statistics().messages_sent == 3
        assert ends.client.statistics().answers == 0


def test_an_exception_of_the_handler_raises_remote_error(stranger: Other, place: Place) -> None:
    with asking(place) as ends:
        stranger.call("open_server", place)
        with pytest.raises(RemoteError, match="ValueError: no answer to 3") as caught:
            ends.client.request(Question(3, pattern(3, BIG), wish="raise"))
        assert caught.value.type_name == "ValueError"
        assert ends.client.request(Question(4)).seed == 4
        until(ends.is_settled)
        assert ends.client.statistics().failures == 1


def test_a_permit_can_be_acquired_before_the_request(stranger: Other, place: Place) -> None:
    with asking(place, max_concurrent_videos=1) as ends:
        stranger.call("open_server", place)
        with ends.sender.message(timeout=30) as permit:
            assert ends.sender.statistics().in_flight == 1
            got = ends.client.request(Question(5, pattern(5, BIG), wish="7"), inside=permit)
            assert is_right(got, 5, BIG)
        with ends.sender.message() as permit:
            ends.client.send(Question(5, pattern(5, BIG)), inside=permit)
        until(ends.is_settled)
        assert ends.sender.statistics().messages_sent == 2


def test_a_message_of_another_sender_is_refused(place: Place) -> None:
    with asking(place) as ends, TensorSender(place.answers) as another, TensorReceiver(place.answers):
        with another.message() as permit, pytest.raises(ValueError, match="this client's sender"):
            ends.client.request(Question(1), inside=permit)
        with pytest.raises(ValueError, match="target must be the index of one of the 1 servers, got 1"):
            ends.client.request(Question(1), target=1)
        with pytest.raises(ValueError, match="target must be the index of one of the 1 servers, got -1"):
            ends.client.send(Question(1), target=-1)


def test_a_request_can_be_sent_to_one_of_several_servers(place: Place) -> None:
    with ExitStack() as stack:
        second = stack.enter_context(parties.place())
        places = [place, second]
        engines = [stack.enter_context(other(api, at.tensors)) for api, at in zip(APIS, places, strict=True)]
        senders = [stack.enter_context(TensorSender(at.tensors, 4)) for at in places]
        client = stack.enter_context(
            MessageClient([at.messages for at in places], sender=senders, reply_type=Answer)
        )
        for engine, at in zip(engines, places, strict=True):
            engine.call("open_server", at)
        for target in (0, 1, 1):
            assert is_right(
                client.request(Question(target, pattern(target, BIG), wish="7"), target=target), target, BIG
            )
        client.send(Question(1, pattern(1, BIG)), target=1)
        assert [sender.statistics().messages_sent for sender in senders] == [1, 3]
        with senders[0].message() as permit:
            client.request(Question(2, pattern(2, BIG)), inside=permit)
        assert [sender.statistics().messages_sent for sender in senders] == [2, 3]

        engines[0].kill()
        until(lambda: client.statistics().servers == 1)
        assert is_right(client.request(Question(6, pattern(6, BIG), wish="7")), 6, BIG)
        assert senders[1].statistics().messages_sent == 4


def test_requests_are_sent_to_the_least_busy_server(place: Place) -> None:
    with parties.place() as second, ExitStack() as stack:
        addresses = [place.messages, second.messages]
        servers = [stack.enter_context(MessageServer(address, Question)) for address in addresses]
        client = stack.enter_context(MessageClient(addresses, reply_type=Answer))
        until(lambda: client.statistics().servers == 2)
        asked = []
        for number in range(4):
            asked.append(in_thread(lambda: client.request(Question(1))))
            until(lambda: sum(client.statistics().in_flight) == number + 1)  # noqa: B023
        assert client.statistics().in_flight == (2, 2)
        for server in servers:
            for _ in range(2):
                server.next().reply(Answer(1))
        assert [one.result().seed for one in asked] == [1, 1, 1, 1]


def test_a_killed_server_raises_peer_lost_error_and_its_successor_answers(
    stranger: Other, place: Place
) -> None:
    with asking(place) as ends:
        stranger.call("open_server", place)
        assert is_right(ends.client.request(Question(1, pattern(1, BIG), wish="7")), 1, BIG)
        pid = stranger.pid
        stranger.stop()
        asked = in_thread(lambda: ends.client.request(Question(2, pattern(2, BIG))))
        until(lambda: ends.client.statistics().messages_sent == 2)
        stranger.kill()
        error = asked.exception()
        assert isinstance(error, PeerLostError)
        assert error.pid == pid
        until(ends.is_settled)
        assert ends.client.statistics().servers_lost == 1
        with other("blocking", place.tensors) as following:
            following.call("open_server", place)
            assert is_right(ends.client.request(Question(3, pattern(3, BIG), wish="7")), 3, BIG)


def test_a_request_that_timed_out_releases_its_permit(stranger: Other, place: Place) -> None:
    with asking(place, max_concurrent_videos=1) as ends:
        stranger.call("open_server", place)
        assert ends.client.request(Question(1)).seed == 1
        stranger.stop()
        try:
            with pytest.raises(TimeoutError):
                ends.client.request(Question(2, pattern(2, BIG)), timeout=0.05)
            assert ends.client.statistics().in_flight == (0,)
            assert ends.sender.statistics().in_flight == 0  # its tensors are discarded
        finally:
            stranger.go_on()
        assert is_right(ends.client.request(Question(3, pattern(3, BIG), wish="7")), 3, BIG)
        until(ends.is_settled)
        assert ends.client.statistics().cancelled == 1


def test_a_request_that_cannot_be_sent_acquires_no_resources(stranger: Other, place: Place) -> None:
    with asking(place, max_concurrent_videos=1) as ends:
        stranger.call("open_server", place)
        with pytest.raises(TypeError):
            ends.client.request(object())
        with pytest.raises(UnsupportedTensorError):
            ends.client.request(Question(1, torch.empty(3, device="meta")))
        with pytest.raises(TooLargeError):
            ends.client.request(Question(1, torch.empty((64 << 20) + 1, dtype=torch.uint8)))
        assert ends.is_settled()
        assert is_right(ends.client.request(Question(3, pattern(3, BIG), wish="7")), 3, BIG)
