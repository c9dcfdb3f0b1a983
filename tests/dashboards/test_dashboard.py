"""A real Prometheus accepts the rules and the queries of the dashboard, and gets data from the examples."""

import asyncio
import json
import math
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.examples.films import film
from tests.examples.programs import ROOT, running, shown
from verification.places import free_port

FOLDER = ROOT / "deploy" / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]

# Grafana replaces these in a query. Each rate interval has several scrapes.
REPLACED = {"$__rate_interval": "20s", "$job": ".*", "$endpoint": ".*"}
# Uploads that succeed at once cause neither waits nor errors, and need neither handles nor broadcast.
WITHOUT_DATA = re.compile("sender|receiver|publisher|subscriber|pipe|wait_seconds|errors")

pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # of the test; the programs have their own
    pytest.mark.timeout(240),
]


def tool(name: str) -> str:
    """Return the path of a program of Prometheus, or skip the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"`{name}` is not installed: it belongs to Prometheus, the Debian package `prometheus`")
    return path


@pytest.mark.parametrize(
    "command", ["check rules alerts", "check config prometheus", "test rules alerts.test"]
)
async def test_promtool_accepts_the_configuration_and_the_alerts_in_each_state(command: str) -> None:
    arguments = [tool("promtool"), *f"{command}.yaml".split()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=FOLDER)  # noqa: ASYNC221
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def prometheus(folder: Path, ports: list[int]) -> AsyncIterator[httpx.AsyncClient]:
    """Run Prometheus with the files of `deploy`, but with other targets and intervals."""
    configuration = msgspec.yaml.decode((FOLDER / "prometheus.yaml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(FOLDER / "alerts.yaml")]
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
    transport = httpx.AsyncHTTPTransport(retries=100)
    async with httpx.AsyncClient(transport=transport, timeout=60, trust_env=False) as client:
        while True:
            assert (await client.post(url, content=body)).status_code in {200, 503}


async def test_every_query_of_the_dashboard_is_valid_and_returns_data_of_the_examples(folder: Path) -> None:
    tool("prometheus")
    film(folder / "film.mkv", 20, height=120, width=160)
    engine_port, server_port = free_port(), free_port()
    start_engine, start_server, shown_upload = shown("fastapi_server")
    start_server += ["--port", str(server_port), "--workers", "1"]
    url = httpx.URL(shown_upload[-1]).copy_with(port=server_port)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running(start_engine, folder, METRICS_PORT=str(engine_port)))
        await stack.enter_async_context(running(start_server, folder))
        await engine.says("the engine is ready")
        http = await stack.enter_async_context(prometheus(folder, [server_port, engine_port]))
        uploads = asyncio.create_task(upload(str(url), (folder / "film.mkv").read_bytes()))
        stack.callback(uploads.cancel)
        missing = set(QUERIES)
        while any(not WITHOUT_DATA.search(query) for query in missing):
            missing = {query for query in missing if not await has_data(http, query)}
            assert not uploads.done()
            await asyncio.sleep(1)
        rules = await answer(http, "/rules")
        assert all(rule["health"] == "ok" for group in rules["groups"] for rule in group["rules"])
