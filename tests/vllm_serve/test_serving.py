"""With the plugin, `vllm serve` answers as without it, copies each video once, and leaves nothing behind."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from bench.vllm_serve.server import FOLDER, Server, ask, ask_all, client_of, program, running, until

VIDEOS = range(12)
BOTH = "tensors,broadcast"
LONG = 4000  # tokens, which take longer than a test waits
MIB = 1 << 20


@pytest.fixture(scope="session")
def stock() -> list[list[int]]:
    """Return the answers of vLLM without the plugin, which are recorded once."""
    path = FOLDER / "answers.json"
    if not path.exists():
        with running("--mm-tensor-ipc", "torch_shm") as server:
            answers = asyncio.run(ask_all(server, VIDEOS))
            assert "aiotensor" not in server.log()
        path.write_text(json.dumps(answers))
    recorded: list[list[int]] = json.loads(path.read_text())
    return recorded


@pytest.fixture(scope="module")
def server(stock: object) -> Iterator[Server]:
    with running(AIOTENSOR_VLLM=BOTH) as server:
        yield server


async def test_answers_are_those_of_stock_vllm_with_one_copy_of_each_video(
    server: Server, stock: list[list[int]]
) -> None:
    assert await ask_all(server, VIDEOS) == stock
    assert_one_copy(server)


def assert_one_copy(server: Server) -> None:
    """Check that only the API servers have copied videos, and that the engines have forwarded all of them."""
    names = ("sender_sent", "sender_copied", "publisher_forwarded")
    # The processes publish their metrics once a second.
    until(lambda: all_equal([server.metric(f"aiotensor_{name}_bytes_total") for name in names]))
    assert server.metric("aiotensor_sender_sent_bytes_total") > 100 * MIB
    assert server.metric("aiotensor_publisher_copied_bytes_total") == 0
    assert server.metric("aiotensor_receiver_copied_bytes_total") == 0


def all_equal(numbers: list[float]) -> bool:
    return len(set(numbers)) == 1 and numbers[0] > 0


def test_every_process_reports_the_plugin_in_the_log_of_vllm(server: Server) -> None:
    enabled = [
        line for line in server.log().splitlines() if "vLLM uses aiotensor for broadcast and tensors" in line
    ]
    pids = [pid for pid, title in server.processes().items() if "VLLM::" in title]
    assert len(pids) == 4  # two API servers, an engine and its worker
    assert len(enabled) == len(pids) + 1  # and the main process, which has not configured its log yet
    for pid in pids:
        assert sum(f"pid={pid})" in line for line in enabled) == 1


async def test_top_shows_the_engine_and_its_workers(server: Server, stock: list[list[int]]) -> None:
    assert await ask_all(server, VIDEOS[:2]) == stock[:2]
    receiver = server.top(server.address)
    assert receiver["kind"] == "receiver"
    assert receiver["statistics"]["tensors_taken"] >= 2
    publisher = server.top(server.address.replace("engine", "engine-workers"))
    assert publisher["kind"] == "publisher"
    assert publisher["statistics"]["published"] >= 1
    assert [lag["behind"] for lag in publisher["statistics"]["lags"]] == [0]


async def test_aborted_requests_release_permits_and_memory(server: Server, stock: list[list[int]]) -> None:
    async with client_of(server) as client:
        asked = [asyncio.create_task(ask(client, number, LONG)) for number in range(2, 34)]
        while not server.metric("vllm:num_requests_running"):
            await asyncio.sleep(0.1)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    until(lambda: not server.metric("vllm:num_requests_running"), 20)
    until(lambda: not server.metric("aiotensor_sender_permits_in_use"), 20)
    assert await ask_all(server, [0]) == stock[:1]
    # A variable of vLLM's engine keeps the last request until the next one arrives.
    until(lambda: server.metric("aiotensor_sender_memory_in_use_bytes") <= 3 * MIB, 20)


async def test_an_arena_that_is_too_small_declines_and_answers_the_same(stock: list[list[int]]) -> None:
    with running(AIOTENSOR_VLLM=BOTH, AIOTENSOR_VLLM_ARENA_BYTES=str(16 * MIB)) as server:
        assert await ask_all(server, VIDEOS) == stock
        until(lambda: server.metric("aiotensor_sender_errors_total"))
        assert "vLLM serializes a tensor: " in server.log()
        assert "vLLM's own queue carries the tensors of a request: " in server.log()


async def test_one_api_server_answers_the_same_with_a_cache_of_inputs(stock: list[list[int]]) -> None:
    cached = ("--api-server-count", "1", "--mm-processor-cache-gb", "1")
    with running(*cached, AIOTENSOR_VLLM=BOTH) as server:
        for _ in range(2):
            assert await ask_all(server, VIDEOS) == stock
        assert server.metric("aiotensor_sender_tensors_sent_total") == len(VIDEOS)


@pytest.mark.parametrize(
    ("sent", "title"),
    [(signal.SIGTERM, ""), (signal.SIGKILL, "APIServer"), (signal.SIGKILL, "VLLM::Worker")],
    ids=["server", "api-server", "worker"],
)
async def test_with_two_workers_a_process_that_ends_under_load_leaves_nothing_behind(
    sent: signal.Signals, title: str, stock: list[list[int]]
) -> None:
    with running("--tensor-parallel-size", "2", AIOTENSOR_VLLM=BOTH) as server:
        assert await ask_all(server, VIDEOS) == stock
        assert_one_copy(server)
        async with client_of(server) as client:
            asked = [asyncio.create_task(ask(client, number, LONG)) for number in range(24)]
            while not server.metric("vllm:num_requests_running"):
                await asyncio.sleep(0.1)
            assert await asyncio.to_thread(server.end, sent, title) == []
            results = await asyncio.gather(*asked, return_exceptions=True)
        # vLLM answers some requests with the tokens so far.
        for result in results:
            assert isinstance(result, httpx.HTTPError) or (isinstance(result, list) and len(result) < LONG)


async def test_two_engines_receive_videos_from_each_api_server(stock: list[list[int]]) -> None:
    with running("--data-parallel-size", "2", AIOTENSOR_VLLM=BOTH) as server:
        assert await ask_all(server, VIDEOS) == stock
        assert_one_copy(server)
        for address in (server.address, server.address.replace("engine", "engine-1")):
            assert [sender["messages"] > 0 for sender in server.top(address)["senders"]] == [True, True]


def test_a_misspelt_variable_is_an_error_at_startup() -> None:
    found = subprocess.run(
        [program("vllm"), "serve", "--help"],
        env={"PYTHONPATH": str(FOLDER / "overlay"), "AIOTENSOR_VLLM_ARENA": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        "ERROR aiotensor leaves vLLM unchanged: the variable AIOTENSOR_VLLM_ARENA is unknown" in found.stderr
    )


CHECK = """
import vllm
from aiotensor.integrations.vllm.checks import BROADCAST, TENSORS, check

check(TENSORS | BROADCAST)
print(vllm.__version__)
"""


@pytest.mark.parametrize(("path", "version"), [("", "0.32.0"), ("overlay", "0.33.0")])
def test_both_versions_have_the_names_that_the_plugin_uses(path: str, version: str) -> None:
    found = subprocess.run(
        [program("python"), "-c", CHECK],
        env={"PYTHONPATH": str(FOLDER / path) if path else "", "VLLM_TARGET_DEVICE": "cpu"},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split()[-1] == version
