"""vLLM's API servers, clients and engine core with the plugin: only the model is a stand-in."""

import asyncio
import multiprocessing
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import PlaceholderRange
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from aiotensor import SenderStatistics, TensorSender
from aiotensor.integrations.vllm import plugin
from aiotensor.integrations.vllm.processes import ClientConsumer
from tests.vllm.serving import ENGINE, engine_config, generate, request, serving
from tests.vllm.stand_in import checksum

ENDLESS = 10_000_000


class Sent(NamedTuple):
    """The statistics of an API server after its requests."""

    statistics: SenderStatistics
    declined: dict[str, int]


def video(seed: int, frames: int = 8) -> torch.Tensor:
    return torch.randint(
        0, 256, (frames, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def video_request(name: str, seed: int, *, tokens: int = 1) -> tuple[EngineCoreRequest, list[int]]:
    """Return a request with a video, further tensors in other places, and the tokens of the answer."""
    tensors = [video(seed), torch.arange(seed, seed + 100), torch.tensor([3, 4, 4])]
    pixels, times, grid = tensors
    sent = request(
        name,
        [{"pixel_values_videos": pixels, "timestamps": [times, times * 2], "video_grid_thw": grid}],
        tokens=tokens,
    )
    return sent, [checksum([pixels, times, times * 2, grid])] * tokens


def consumer_of(client: AsyncMPClient) -> ClientConsumer:
    consumer = client.encoder.oob_tensor_consumer
    assert isinstance(consumer, ClientConsumer), consumer
    return consumer


def statistics_of(client: AsyncMPClient) -> SenderStatistics:
    [sender] = consumer_of(client).senders.values()
    assert isinstance(sender, TensorSender)
    return sender.statistics()


async def settled(client: AsyncMPClient, index: int) -> Sent:
    """Wait until all permits and all memory were released.

    A variable of vLLM's engine keeps the last request until the next one arrives.
    """
    await generate(client, request(f"{index}-text"))
    return await released(client)


async def released(client: AsyncMPClient) -> Sent:
    while (now := statistics_of(client)).in_flight or now.bytes_in_use:
        await asyncio.sleep(0.01)
    return Sent(now, dict(consumer_of(client).declined))


async def send_videos(client: AsyncMPClient, count: int, index: int) -> Sent:
    pairs = [video_request(f"{index}-{number}", 100 * index + number) for number in range(count)]
    expected = {sent.request_id: tokens for sent, tokens in pairs}
    assert await generate(client, *(sent for sent, _ in pairs)) == expected
    return await settled(client, index)


async def send_until_killed(client: AsyncMPClient, victim: int, index: int) -> Sent | None:
    """Send requests; one server is killed while the engine works on its requests."""
    if index == victim:
        for number in range(40):
            sent, _ = video_request(f"{index}-{number}", number, tokens=ENDLESS)
            await client.add_request_async(sent)
        os.kill(os.getpid(), signal.SIGKILL)
    return await send_videos(client, 10, index)


async def lose_a_tensor(client: AsyncMPClient, has_data: bool, index: int) -> Sent:
    """Send a request whose tensors are discarded first, then others."""
    lost, _ = video_request("lost", 1)
    if not has_data:  # the engine has cached them, and the request contains only a mask
        [feature] = lost.mm_features
        feature.data, feature.mm_position = None, PlaceholderRange(0, 300, torch.ones(300, dtype=torch.bool))
    consumer = consumer_of(client)
    placeholders: list[dict[str, Any]] = []

    class Recording(ClientConsumer):
        def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
            data = super().__call__(tensor)
            if data is not None:
                placeholders.append(data)
            return data

    consumer.__class__ = Recording
    with consumer.message():
        buffers = client.encoder.encode(lost)
    consumer.__class__ = ClientConsumer
    assert len(placeholders) == (3 if has_data else 1)
    consumer.discard(placeholders[0])
    await client._send_input_message((EngineCoreRequestType.ADD.value, *buffers), client.core_engine)
    outputs = await client.get_output_async()
    [output] = outputs.outputs
    assert (output.request_id, output.finish_reason) == ("lost", FinishReason.ERROR)
    assert output.mm_cache_miss_hashes == ["lost-0"]  # the client may send the request again
    return await send_videos(client, 4, index)


async def engine_dies(client: AsyncMPClient, engine: int, index: int) -> Sent:
    """Kill the engine while it works, and send to it."""
    for number in range(4):
        sent, _ = video_request(f"{index}-{number}", number, tokens=ENDLESS)
        await client.add_request_async(sent)
    os.kill(engine, signal.SIGKILL)
    while statistics_of(client).receivers_lost == 0:
        await asyncio.sleep(0.01)
    sent, _ = video_request("late", 1)
    client.resources.engine_dead = True  # as vLLM's monitor sets it
    try:
        await client.add_request_async(sent)
    except EngineDeadError:
        return await released(client)
    raise AssertionError("vLLM has sent a request to a dead engine")


@pytest.fixture(autouse=True)
def enabled(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the plugin in this process, which starts the engine, and in its children."""
    monkeypatch.setenv("AIOTENSOR_VLLM", "tensors")
    monkeypatch.setenv("VLLM_PLUGINS", "aiotensor")
    plugin.register()


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return engine_config(tmp_path)


def test_three_servers_send_their_videos_without_serializing_a_tensor(config: VllmConfig) -> None:
    with serving(config, servers=3, target=send_videos, argument=6) as running:
        for sent in running.results():
            assert sent.declined == {}
            # One permit for the tensors of a request; tiny tensors are part of the request.
            assert (sent.statistics.messages_sent, sent.statistics.tensors_sent) == (6, 18)


def test_requests_without_a_permit_are_serialized_and_answered(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOTENSOR_VLLM_MAX_CONCURRENT_VIDEOS", "1")
    with serving(config, servers=1, target=send_videos, argument=6) as running:
        [sent] = running.results()
        assert sent.statistics.max_concurrent_videos == 1
        # The first of them may be declined before the engine has answered the sender.
        assert sent.declined.keys() <= {"WouldBlockError", "UnavailableError"}
        # Each request has three tensors.
        assert sum(sent.declined.values()) == 3 * (6 - sent.statistics.messages_sent)
        assert sent.statistics.messages_sent < 6


def test_a_killed_server_under_load_leaves_the_engine_and_the_others_unharmed(config: VllmConfig) -> None:
    with serving(config, servers=3, target=send_until_killed, argument=1) as running:
        with pytest.raises(RuntimeError, match="ended with status -9"):
            running.result(1)
        for index in (0, 2):
            assert running.result(index).declined == {}
        assert running.engine.is_alive()


@pytest.mark.parametrize("has_data", [True, False])
def test_a_lost_tensor_fails_its_request_and_no_other(config: VllmConfig, has_data: bool) -> None:
    with serving(config, servers=1, target=lose_a_tensor, argument=has_data) as running:
        [sent] = running.results()
        assert sent.statistics.messages_discarded == 1


async def use_two_clients(config: VllmConfig) -> None:
    with ExitStack() as stack:
        first = AsyncMPClient(config, Executor.get_class(config), False)
        stack.callback(first.shutdown)
        second = SyncMPClient(config, Executor.get_class(config), False)
        stack.callback(second.shutdown)
        assert (await send_videos(first, 2, 0)).declined == {}
        sent, tokens = video_request("sync", 1)
        second.add_request(sent)
        [output] = second.get_output().outputs
        assert output.new_token_ids == tokens
        assert second.encoder.oob_tensor_consumer.senders
        assert second.encoder.oob_tensor_consumer.declined == {}


def run_two_clients(config: VllmConfig) -> None:
    load_general_plugins()
    asyncio.run(use_two_clients(config))


def test_two_clients_of_one_process_send_to_their_own_engines(config: VllmConfig) -> None:
    process = multiprocessing.get_context("spawn").Process(target=run_two_clients, args=(config,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_killed_engine_under_load_is_reported_by_vllm_and_leaves_no_memory_in_use(
    config: VllmConfig,
) -> None:
    with serving(config, servers=1, target=engine_dies, argument=ENGINE) as running:
        [sent] = running.results()
        assert set(sent.declined) == {"UnavailableError"}
        assert sent.statistics.receivers_lost == 1
