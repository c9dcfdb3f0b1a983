"""Metrics agree with the tensors and messages that were transferred."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    PeerLostError,
    RemoteError,
    TensorHandle,
    TensorReceiver,
    TensorSender,
)
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.integrations.prometheus import AioTensorCollector
from tests.channel import parties
from tests.integrations.scraping import Numbers, at, new_registry, scrape
from verification.patterns import BIG, pattern
from verification.places import LINKS
from verification.processes import peers
from verification.processes.peers import State
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PATIENCE_S = 20.0  # more than a loop needs to answer that is not blocked


@contextmanager
def address() -> Iterator[str]:
    """Return a new address for each test, since counts at an address persist."""
    with LINKS["unix"].place() as place:
        assert isinstance(place.endpoint, str)
        yield place.endpoint


# Under load, in processes


async def _send_under_load(state: State, rounds: int) -> list[TensorHandle]:
    """Send as many at once as there are permits, and some more."""
    sizes = [3, BIG, 1000] * rounds
    return await asyncio.gather(*(state.sender.send(pattern(0, size)) for size in sizes))


async def _receive_all(state: State, count: int) -> None:
    """Receive tensors as they come, and some of them twice."""
    for index in range(count):
        delivery = await anext(state.receiver)
        assert torch.equal(delivery.tensor, pattern(0, delivery.tensor.numel()))
        if index % 4 == 0:
            with pytest.raises(AlreadyTakenError):
                await state.receiver.receive(delivery.handle)


async def _scrape_there(state: State) -> Numbers:
    """Scrape in a peer, off its loop."""
    return await asyncio.to_thread(scrape, new_registry(timeout_s=PATIENCE_S))


async def test_metrics_of_each_process_under_load_parse_and_agree_with_the_sent_tensors() -> None:
    rounds = 12
    tensors, nbytes = 3 * rounds, (3 + BIG + 1000) * 8 * rounds
    with address() as place:
        async with peers.peers(place, 2) as [api, engine]:
            await engine.call(peers.open_receiver)
            await api.call(peers.open_sender, 2, 1 << 30)
            taking = engine.start(_receive_all, tensors)
            sending = api.start(_send_under_load, rounds)
            while not sending.done():
                for peer in (api, engine):
                    assert at(await peer.call(_scrape_there), place)
            await asyncio.gather(taking, sending)
            await api.call(peers.drain)
            sent, received = [at(await peer.call(_scrape_there), place) for peer in (api, engine)]
    assert sent["aiotensor_sender_tensors_sent_total"] == tensors
    assert sent["aiotensor_sender_messages_sent_total"] == tensors
    assert sent["aiotensor_sender_sent_bytes_total"] == nbytes
    assert sent["aiotensor_sender_tensors_copied_total"] == rounds
    assert sent["aiotensor_sender_copied_bytes_total"] == rounds * BIG * 8
    assert sent["aiotensor_sender_permits_in_use"] == 0
    assert sent["aiotensor_sender_permits_limit"] == sent["aiotensor_sender_permits_peak"] == 2
    # All but the first two waited for a permit; the `send_nowait` calls failed without waiting.
    assert sent["aiotensor_sender_wait_seconds_count{for=permit}"] == tensors - 2
    assert sent["aiotensor_sender_wait_seconds_bucket{for=permit,le=+Inf}"] == tensors - 2
    assert sent["aiotensor_sender_wait_seconds_sum{for=permit}"] > 0
    assert sent["aiotensor_sender_wait_seconds_count{for=memory}"] == 0
    assert sent["aiotensor_sender_errors_total{type=PeerLostError}"] == 0
    assert received["aiotensor_receiver_tensors_taken_total"] == tensors
    assert received["aiotensor_receiver_taken_bytes_total"] == nbytes
    assert received["aiotensor_receiver_senders"] == 1
    assert received["aiotensor_receiver_unclaimed_tensors"] == 0
    assert received["aiotensor_receiver_errors_total{type=AlreadyTakenError}"] == tensors / 4


# Threads


def test_a_blocked_loop_delays_a_scrape_by_at_most_the_timeout_and_keeps_its_counters() -> None:
    blocked, go_on, done = threading.Event(), threading.Event(), threading.Event()

    async def live(place: str) -> None:
        async with TensorReceiver(place) as receiver, TensorSender(place) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
            await settled(sender)
            counted.append(scrape(quick))  # on the loop itself
            blocked.set()
            go_on.wait()
            await asyncio.to_thread(done.wait)

    quick, patient = new_registry(timeout_s=0.05), new_registry(timeout_s=PATIENCE_S)
    counted: list[Numbers] = []
    with address() as place:
        thread = threading.Thread(target=asyncio.run, args=(live(place),))
        thread.start()
        blocked.wait()
        during = scrape(quick)
        assert at(during, place) == at(counted[0], place)
        assert at(during, place)["aiotensor_sender_tensors_sent_total"] == 1
        timeouts = counted[0]["aiotensor_scrape_timeouts_total", ()]
        assert during["aiotensor_scrape_timeouts_total", ()] == timeouts + 1
        go_on.set()
        assert scrape(patient)["aiotensor_scrape_timeouts_total", ()] == timeouts + 1
        done.set()
        thread.join()


# Counters and gauges


async def test_counters_of_closed_objects_persist_and_their_gauges_disappear() -> None:
    registry = new_registry()
    seen: list[dict[str, float]] = []
    with address() as place:
        for _ in range(3):
            async with TensorReceiver(place) as receiver, TensorSender(place) as sender:
                await receiver.receive(await sender.send(pattern(0, BIG)))
                seen.append(at(scrape(registry), place))
            seen.append(at(scrape(registry), place))
        late = at(scrape(new_registry()), place)  # registered after all objects were closed
    assert [one["aiotensor_sender_tensors_sent_total"] for one in seen] == [1, 1, 2, 2, 3, 3]
    assert [one.get("aiotensor_sender_permits_limit") for one in seen] == [8, None] * 3
    for before, after in itertools.pairwise(seen):
        for name, value in before.items():
            if name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert after[name] >= value
    assert late == seen[-1]


async def test_the_requests_of_each_engine_are_counted_separately() -> None:
    with parties.place() as one, parties.place() as other:
        places = [one, other]
        async with (
            MessageServer(one, parties.Question) as answering,
            MessageServer(other, parties.Question) as silent,
            MessageClient(places, parties.Answer) as client,
        ):
            serving = asyncio.create_task(answering.serve(parties.answer))
            for seed in range(3):
                await client.request(parties.Question(seed), target=0)
            with parties.said(), pytest.raises(RemoteError):
                await client.request(parties.Question(0, wish="raise"), target=0)
            lost = asyncio.create_task(client.request(parties.Question(9), target=1))
            async with await anext(silent):
                before = scrape(new_registry())
                await silent.aclose()
            with pytest.raises(PeerLostError):
                await lost
            after = scrape(new_registry())
            await answering.aclose()
            await serving

    assert at(before, places[1])["aiotensor_engine_in_flight"] == 1
    answered, missed = at(after, places[0]), at(after, places[1])
    assert (
        answered["aiotensor_engine_answers_total"] == answered["aiotensor_engine_answer_seconds_count"] == 3
    )
    assert answered["aiotensor_engine_failures_total"] == answered["aiotensor_engine_connected"] == 1
    assert missed["aiotensor_engine_requests_lost_total"] == missed["aiotensor_engine_losses_total"] == 1
    assert missed["aiotensor_engine_in_flight"] == missed["aiotensor_engine_connected"] == 0


# Collectors


def test_invalid_arguments_are_refused() -> None:
    for timeout_s in (-1, inf, float("nan")):
        with pytest.raises(ValueError, match="timeout_s must be at least 0 seconds"):
            new_registry(timeout_s=timeout_s)
    registry = new_registry()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(AioTensorCollector())
