"""A server in a thread handles requests in batches."""

import pytest

from aiotensor import RemoteError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.waiting import in_thread, until
from tests.blocking.works import answer
from tests.channel.parties import Answer, Place, Question, said
from verification.patterns import pattern

_LONG_S = 60.0


def test_each_request_gets_the_result_for_its_message(place: Place) -> None:
    sizes = []

    def handle(questions: list[Question]) -> list[Answer]:
        sizes.append(len(questions))
        return [answer(question) for question in questions]

    with (
        TensorReceiver(place.tensors) as receiver,
        MessageServer(place.messages, Question, receiver=receiver) as server,
        TensorSender(place.tensors) as sender,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
    ):
        serving = in_thread(lambda: server.serve(handle, max_batch=4, batch_wait_s=_LONG_S))
        asked = [
            in_thread(lambda seed=seed: client.request(Question(seed, pattern(seed, 3))))  # type: ignore[misc]
            for seed in range(8)
        ]
        assert [one.result().seed for one in asked] == list(range(8))
        assert [one.result().total for one in asked] == [int(pattern(seed, 3).sum()) for seed in range(8)]
        assert sizes == [4, 4]
        server.close()
        serving.result()


def test_errors_are_raised_in_the_clients_of_their_messages(place: Place) -> None:
    def handle(questions: list[Question]) -> list[object]:
        if any(question.wish == "raise" for question in questions):
            raise ValueError("no memory on the GPU")
        return [KeyError("unknown") if question.seed == 1 else answer(question) for question in questions]

    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, reply_type=Answer) as client,
        said() as texts,
    ):
        serving = in_thread(lambda: server.serve(handle, max_batch=2, batch_wait_s=_LONG_S))
        good, bad = [in_thread(lambda seed=seed: client.request(Question(seed))) for seed in range(2)]  # type: ignore[misc]
        assert good.result().seed == 0
        with pytest.raises(RemoteError, match="unknown"):
            bad.result()
        assert texts == []
        failed = [in_thread(lambda: client.request(Question(0, wish="raise"))) for _ in range(2)]
        for one in failed:
            with pytest.raises(RemoteError, match="no memory on the GPU"):
                one.result()
        assert len(texts) == 1
        assert texts[0].startswith("answering a batch of 2 requests failed")
        server.close()
        serving.result()


def test_batches_are_iterated_over_until_the_server_is_closed(place: Place) -> None:
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        asked = [in_thread(lambda: client.request(Question(7))) for _ in range(3)]
        until(lambda: server.statistics().waiting == 3)
        batches = server.batches(2)
        for size in (2, 1):
            batch = next(batches)
            assert len(batch) == size
            for request in batch:
                with request:
                    request.reply(answer(request.message))
        assert [one.result().seed for one in asked] == [7, 7, 7]
        server.close()
        assert list(batches) == []
