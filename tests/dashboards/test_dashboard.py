"""Every query of the dashboard returns data of the examples in a real Prometheus."""

import asyncio
import json
import math
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.dashboards.tools import tool
from tests.examples.films import film
from tests.examples.programs import ROOT, running, shown
from verification.places import free_port

DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"

# Grafana replaces these in a query. Each rate interval has several scrapes.
REPLACED = {"$__rate_interval": "20s", "$job": ".*", "$endpoint": ".*"}

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # of the test; the programs have their own
    pytest.mark.timeout(240),
]


@asynccontextmanager
async def prometheus(folder: Path, ports: list[int]) -> AsyncIterator[httpx.AsyncClient]:
    """Run Prometheus with the files of `deploy`, but with other targets and intervals."""
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    configuration = msgspec.yaml.decode(text)
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(ALERTS)]
    [job] = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    (folder / "prometheus.yaml").write_bytes(msgspec.yaml.encode(configuration))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        tool("prometheus"),
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        transport = httpx.AsyncHTTPTransport(retries=20)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/api/v1", transport=transport, timeout=30, trust_env=False
        ) as http:
            while (await http.get(f"http://127.0.0.1:{port}/-/ready")).status_code != 200:
                await asyncio.sleep(0.1)
            yield http
    finally:
        process.kill()
        await process.wait()


async def answer(http: httpx.AsyncClient, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus."""
    found = await http.get(path, params=parameters)
    assert found.status_code == 200, (parameters, found.text)
    return found.json()["data"]


async def has_data(http: httpx.AsyncClient, query: str) -> bool:
    """Return whether a query of the dashboard has a number now."""
    for name, value in REPLACED.items():
        query = query.replace(name, value)
    data = await answer(http, "/query", query=query)
    return not all(math.isnan(float(series["value"][1])) for series in data["result"])


async def upload(url: str, body: bytes) -> None:
    """Upload a video again and again."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        while True:
            assert (await client.post(url, content=body)).status_code in {200, 503}


async def test_every_query_of_the_dashboard_returns_data_of_the_examples(folder: Path) -> None:
    tool("prometheus")
    film(folder / "film.mkv", 20, height=120, width=160)
    engine_port, server_port, traffic_port = free_port(), free_port(), free_port()
    start_engine, start_server, shown_upload = shown("fastapi_server")
    start_server += ["--port", str(server_port), "--workers", "1"]
    start_traffic = ["python", "-m", "tests.dashboards.traffic", str(traffic_port)]
    metrics = {"METRICS_PORT": str(engine_port)}
    url = httpx.URL(shown_upload[-1]).copy_with(port=server_port)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running(start_engine, folder, **metrics))
        server = await stack.enter_async_context(running(start_server, folder))
        traffic = await stack.enter_async_context(running(start_traffic, folder))
        await engine.says("the engine is ready")
        await answers(url.join("/ready"))
        http = await stack.enter_async_context(prometheus(folder, [server_port, engine_port, traffic_port]))
        body = (folder / "film.mkv").read_bytes()
        uploads = [asyncio.create_task(upload(str(url), body)) for _ in range(3)]
        for task in uploads:
            stack.callback(task.cancel)

        missing = await remaining(
            http, QUERIES, uploads, until=lambda left: all("errors" in one for one in left)
        )
        # The client fails in the requests that an engine has not answered.
        engine.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        engine.process.kill()
        engine = await stack.enter_async_context(running(start_engine, folder, **metrics))
        await engine.says("the engine is ready")
        assert not await remaining(http, missing, uploads, until=lambda left: not left)

        [series] = [await answer(http, "/series", **{"match[]": '{__name__=~"aiotensor_.+"}'})]
        assert {"job", "endpoint"} <= {label for one in series for label in one}
        assert server.process.returncode is traffic.process.returncode is None
        rules = await answer(http, "/rules")
        found = [rule for group in rules["groups"] for rule in group["rules"]]
        assert len(found) == ALERTS.read_text().count("- alert:")
        assert all(rule["health"] == "ok" for rule in found)


async def answers(url: httpx.URL) -> None:
    """Wait until a page is answered."""
    transport = httpx.AsyncHTTPTransport(retries=100)
    async with httpx.AsyncClient(transport=transport, timeout=60, trust_env=False) as http:
        assert (await http.get(url)).status_code == 200


async def remaining(
    http: httpx.AsyncClient,
    queries: list[str],
    uploads: list[asyncio.Task[None]],
    until: Callable[[list[str]], bool],
) -> list[str]:
    """Repeat queries that have returned no data so far, and return the rest; at most a minute."""
    left = list(queries)
    for _ in range(60):
        left = [query for query in left if not await has_data(http, query)]
        if until(left):
            break
        await asyncio.sleep(1)
        for task in uploads:
            if task.done():
                task.result()
    return left
