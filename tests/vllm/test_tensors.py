"""vLLM's API servers, clients and engine core with the plugin: only the model is a stand-in."""

from pathlib import Path

import pytest
from vllm.config import VllmConfig

from aiotensor.integrations.vllm import plugin
from tests.vllm import servers
from tests.vllm.serving import ENGINE, engine_config, serving


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
    with serving(config, servers=3, target=servers.send_videos, argument=6) as running:
        for sent in running.results():
            assert sent.declined == {}
            # One permit for the tensors of a request; tiny tensors are part of the request.
            assert (sent.statistics.messages_sent, sent.statistics.tensors_sent) == (6, 18)


def test_requests_without_a_permit_are_serialized_and_answered(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOTENSOR_VLLM_MAX_CONCURRENT_VIDEOS", "1")
    with serving(config, servers=1, target=servers.send_videos, argument=6) as running:
        [sent] = running.results()
        assert sent.statistics.max_concurrent_videos == 1
        # The first of them may be declined before the engine has answered the sender.
        assert sent.declined.keys() <= {"WouldBlockError", "UnavailableError"}
        # Each request has three tensors.
        assert sum(sent.declined.values()) == 3 * (6 - sent.statistics.messages_sent)
        assert sent.statistics.messages_sent < 6


def test_a_killed_server_under_load_leaves_the_engine_and_the_others_unharmed(config: VllmConfig) -> None:
    with serving(config, servers=3, target=servers.send_until_killed, argument=1) as running:
        with pytest.raises(RuntimeError, match="ended with status -9"):
            running.result(1)
        for index in (0, 2):
            assert running.result(index).declined == {}
        assert running.engine.is_alive()


def test_a_lost_tensor_fails_its_request_and_no_other(config: VllmConfig) -> None:
    with serving(config, servers=1, target=servers.lose_a_tensor) as running:
        [sent] = running.results()
        assert sent.statistics.messages_discarded == 1


def test_a_killed_engine_under_load_is_reported_by_vllm_and_leaves_no_memory_in_use(
    config: VllmConfig,
) -> None:
    with serving(config, servers=1, target=servers.engine_dies, argument=ENGINE) as running:
        [sent] = running.results()
        assert set(sent.declined) == {"PeerLostError"}
        assert sent.statistics.receivers_lost == 1
