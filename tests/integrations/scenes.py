"""A server, its engine, and an upload."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from tests.integrations import engine, sites
from tests.integrations.sites import Site, http_client, site
from tests.integrations.totals import Total, total_of
from verification.processes.peers import Peer, peers

__all__ = ["UPLOAD", "MiB", "Scene", "is_answered", "scene"]

MiB = 1 << 20
UPLOAD = bytes(range(256)) * 256  # its tensor has a MiB
RETRY_AFTER = "2"


@dataclass
class Scene:
    """A server and its engines, of which the first is open."""

    site: Site
    http: httpx.AsyncClient
    engines: list[Peer]
    messages: str
    workers: int


@asynccontextmanager
async def scene(
    kind: str,
    folder: Path,
    *,
    engines: int = 1,
    workers: int = 2,
    arena_bytes: int = 64 * MiB,
    max_wait_s: float = 20,
    **more: str,
) -> AsyncIterator[Scene]:
    tensors, messages = f"unix://{folder}/t", f"ipc://{folder}/m"
    async with (
        peers(tensors, engines) as ready,
        site(
            kind,
            workers=workers,
            tensors=tensors,
            messages=messages,
            arena_bytes=arena_bytes,
            max_wait_s=max_wait_s,
            **more,
        ) as server,
        http_client(server) as http,
    ):
        await ready[0].call(engine.open_engine, messages)
        on = Scene(server, http, ready, messages, 1 if kind == "aiohttp" else workers)
        await sites.workers(
            http, on.workers
        )  # a worker that is still starting ends without closing its sender
        yield on


def is_answered(response: httpx.Response) -> bool:
    """Return whether an upload was answered with its total; otherwise check its refusal."""
    if response.status_code == 200:
        assert msgspec.json.decode(response.content, type=Total).total == total_of(UPLOAD)
        return True
    assert response.status_code == 503, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == RETRY_AFTER
    problem = response.json()
    assert (problem["status"], problem["title"]) == (503, "Service Unavailable")
    assert problem["reason"] in {"busy", "engine_lost", "engine_unavailable"}
    return False
