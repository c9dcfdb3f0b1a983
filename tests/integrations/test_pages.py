"""The programs of docs/metrics.md do what the page says."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI

from aiotensor import TensorReceiver
from tests.integrations.scraping import at, parse
from verification.places import LINKS
from verification.waiting import until

ROOT = Path(__file__).parents[2]
PROGRAMS: list[str] = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL | re.M
)


def program(*words: str) -> str:
    """Find the one program of the page that has all of these words."""
    [found] = [text for text in PROGRAMS if all(word in text for word in words)]
    return found


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program of the page with a separate registry, and return its names."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setattr(
        prometheus_client, "generate_latest", lambda: prometheus_client.exposition.generate_latest(registry)
    )
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, "metrics.md", "exec"), names)  # noqa: S102 - it is ours
    return names


async def test_the_program_for_fastapi_answers_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    app: FastAPI = run(program("FastAPI", "AioTensorCollector"), monkeypatch)["app"]
    with LINKS["unix"].place() as place:
        assert isinstance(place.endpoint, str)
        async with (
            TensorReceiver(place.endpoint),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client,
        ):
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain")
            assert at(parse(response.text), place.endpoint)["aiotensor_receiver_senders"] == 0


async def test_the_program_for_aiohttp_answers_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    app = run(program("aiohttp", "AioTensorCollector"), monkeypatch)["app"]
    with LINKS["unix"].place() as place:
        assert isinstance(place.endpoint, str)
        async with TensorReceiver(place.endpoint), TestClient(TestServer(app)) as client:
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain")
            assert at(parse(await response.text()), place.endpoint)["aiotensor_receiver_senders"] == 0


@contextlib.asynccontextmanager
async def gunicorn(folder: Path, address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start the page's server with two workers, as the page says."""
    text = program("MultiprocessPublisher").replace("unix:///run/user/1000/engine.tensors", address)
    (folder / "server.py").write_text(text.replace("interval_s=5.0", "interval_s=0.05"))
    (folder / "gunicorn.conf.py").write_text(_configuration())
    (folder / "metrics").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gunicorn", "-w", "2", "-k", "uvicorn_worker.UvicornWorker"),
            *("-c", "gunicorn.conf.py", "--bind", f"fd://{listener.fileno()}", "server:app"),
            cwd=folder,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"), "PYTHONPATH": str(ROOT)},
            pass_fds=[listener.fileno()],
            stderr=asyncio.subprocess.DEVNULL,
        )
        port = listener.getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield client
        finally:
            process.terminate()
            await process.wait()


def _configuration() -> str:
    [text] = re.findall(
        r"^    ```python\n(.*?)^    ```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL | re.M
    )
    return textwrap.dedent(text)


async def test_workers_of_gunicorn_are_added_up_and_one_that_is_killed_leaves_no_gauges(
    tmp_path: Path,
) -> None:
    with LINKS["unix"].place() as place:
        assert isinstance(place.endpoint, str)
        async with (
            TensorReceiver(place.endpoint) as receiver,
            gunicorn(tmp_path, place.endpoint) as client,
        ):

            async def limit() -> float | None:
                try:
                    response = await client.get("/metrics")
                except httpx.TransportError:
                    return None  # the connection was one to the worker that was killed
                if response.status_code == 500:
                    return None  # prometheus_client cannot read a file that a worker has just created
                return at(parse(response.text), place.endpoint).get("aiotensor_sender_permits_limit")  # type: ignore[arg-type]

            await until(lambda: receiver.statistics().senders == 2)
            while await limit() != 16:
                await asyncio.sleep(0)
            pids = {int(name.rpartition("_")[2][:-3]) for name in os.listdir(tmp_path / "metrics")}
            assert len(pids) == 2
            killed = pids.pop()
            last = tmp_path / "metrics" / f"histogram_{killed}.db"  # that it writes
            # A worker that is killed while the file is empty makes it unreadable for all others.
            await until(lambda: last.exists() and last.stat().st_size > 0)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: receiver.statistics().senders_lost == 1)
            await until(lambda: receiver.statistics().senders == 2)  # gunicorn has started another
            while await limit() != 16:  # and not 24
                await asyncio.sleep(0)
            left = sorted(name for name in os.listdir(tmp_path / "metrics") if f"_{killed}.db" in name)
            assert left == [f"counter_{killed}.db", f"histogram_{killed}.db"]
