"""The spans of waits that time out, on both sides of a channel."""

import asyncio

import pytest

from aiotensor import TensorSender, UnavailableError, WouldBlockError
from aiotensor.channel import MessageClient
from tests.channel.parties import Answer, Question, channel, place
from tests.channel.peers import listening
from tests.integrations.opentelemetry.spans import Recorder, Seen, one
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LIMIT_S = 0.5


def _check(waited: Seen, error: type[Exception]) -> None:
    assert (waited.status, waited.events) == ("ERROR", ("exception",))
    assert waited.attributes == {"error.type": f"aiotensor.errors.{error.__name__}"}
    assert waited.ended - waited.began >= LIMIT_S * 0.9e9


async def test_a_wait_for_credit_that_times_out_ends_with_an_error(recorder: Recorder) -> None:
    async with channel(server={"max_waiting": 1}, client={"max_wait_s": LIMIT_S}) as ends:
        await ends.client.ready()
        first = asyncio.create_task(ends.client.request(Question(1)))
        await until(lambda: ends.server.statistics().waiting == 1)
        with pytest.raises(WouldBlockError):
            await ends.client.request(Question(2))
        first.cancel()
        await asyncio.wait([first])
    _check(one(recorder.seen, "aiotensor wait for credit"), WouldBlockError)


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_wait_for_a_server_that_times_out_ends_with_an_error(
    servers: int, recorder: Recorder
) -> None:
    with place() as one_place, place() as another:
        addresses = [one_place.messages, another.messages][:servers]
        async with MessageClient(addresses, reply_type=Answer, max_wait_s=LIMIT_S) as client:
            with pytest.raises(UnavailableError):
                await client.request(Question(1))
    _check(one(recorder.seen, "aiotensor wait for a server"), UnavailableError)


async def test_a_permit_that_waits_for_a_server_in_vain_has_a_span_for_the_wait(recorder: Recorder) -> None:
    with place() as here:
        sender = TensorSender(here.tensors, 1)
        async with MessageClient(
            here.messages, sender=sender, reply_type=Answer, max_wait_s=LIMIT_S
        ) as client:
            with pytest.raises(UnavailableError):
                await client.permit().__aenter__()
    _check(one(recorder.seen, "aiotensor wait for a server"), UnavailableError)


async def test_a_permit_that_waits_until_a_server_connects_has_a_span_for_the_wait(
    recorder: Recorder,
) -> None:
    with place() as here:
        async with MessageClient(
            here.messages, sender=TensorSender(here.tensors, 1), reply_type=Answer
        ) as client:
            waiting = asyncio.create_task(client.permit().__aenter__())
            await until(lambda: "aiotensor wait for a server" in recorder.unfinished.values())
            async with listening(here):
                permit = await waiting
                await permit.__aexit__(None, None, None)
    assert one(recorder.seen, "aiotensor wait for a server").status == "UNSET"


async def test_a_wait_for_a_permit_of_several_servers_that_times_out_ends_with_an_error(
    recorder: Recorder,
) -> None:
    with place() as here, place() as there:
        async with (
            listening(here),
            listening(there),
            MessageClient(
                [here.messages, there.messages],
                sender=[TensorSender(one.tensors, 1, max_wait_s=LIMIT_S) for one in (here, there)],
                reply_type=Answer,
            ) as client,
        ):
            await until(lambda: client.statistics().servers == 2)
            for sender in client.senders:
                await sender.ready()
            async with client.permit(), client.permit():
                with pytest.raises(WouldBlockError):
                    await client.request(Question(1, pattern(1, BIG)))
    _check(one(recorder.seen, "aiotensor wait for a permit"), WouldBlockError)
