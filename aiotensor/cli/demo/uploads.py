"""Upload videos over HTTP, several at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import msgspec

from aiotensor.cli.demo.messages import VideoAnswer

__all__ = ["Outcome", "Upload", "http_client", "upload_all"]


class Outcome(StrEnum):
    """What became of one upload."""

    ANSWERED = "answered"
    MISMATCHED = "mismatched"  # answered, but the engine saw other bytes than the server sent
    REFUSED = "refused"  # a 4xx: the file is at fault
    FAILED = "failed"  # a 5xx: the server or the engine is at fault
    LOST = "lost"  # sent, and never answered


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload that is over.

    Attributes:
        clip: the file that was uploaded.
        outcome: what became of it.
        answer: the server's answer, where there is one.
        reason: what went wrong, where something did.
    """

    clip: Path
    outcome: Outcome
    answer: VideoAnswer | None = None
    reason: str = ""


def http_client(base_url: str) -> httpx.AsyncClient:
    """Make a client that waits as long as the server does, and uses no proxy from the environment."""
    # A connection stays with the worker that accepted it: as from so many users, each upload has its own.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False)  # noqa: S113


async def upload_all(
    client: httpx.AsyncClient,
    clips: Sequence[Path],
    *,
    concurrency: int,
    on_done: Callable[[Upload], None],
) -> list[Upload]:
    """Upload these files.

    Args:
        client: a client of the API server.
        clips: the files, each as often as it is to be uploaded.
        concurrency: how many are on their way at once.
        on_done: called after each.
    """
    uploads: list[Upload] = []
    waiting = iter(clips)

    async def work() -> None:
        for clip in waiting:  # shared by all workers
            upload = await _upload(client, clip)
            uploads.append(upload)
            on_done(upload)

    async with anyio.create_task_group() as group:
        for _ in range(min(concurrency, len(clips))):
            group.start_soon(work)
    return uploads


async def _upload(client: httpx.AsyncClient, clip: Path) -> Upload:
    try:
        with await anyio.to_thread.run_sync(clip.open, "rb") as file:
            response = await client.post("/videos", files={"file": (clip.name, file)})
    except OSError as error:
        return Upload(clip, Outcome.REFUSED, reason=f"the file cannot be read: {error.strerror}")
    except httpx.HTTPError as error:
        return Upload(clip, Outcome.LOST, reason=f"no answer: {str(error) or type(error).__name__}")
    if response.is_success:
        answer = msgspec.json.decode(response.content, type=VideoAnswer)
        if answer.sent == answer.received:
            return Upload(clip, Outcome.ANSWERED, answer)
        return Upload(clip, Outcome.MISMATCHED, answer, "the engine saw other bytes than the server sent")
    outcome = Outcome.REFUSED if response.is_client_error else Outcome.FAILED
    return Upload(clip, outcome, reason=f"{_detail(response)} (status {response.status_code})")


def _detail(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content, type=dict[str, object])["detail"])
    except (msgspec.MsgspecError, KeyError):  # not one of the server's own refusals
        return response.text or response.reason_phrase
