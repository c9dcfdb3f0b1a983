"""Upload videos over HTTP, several at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import msgspec

from demo.messages import VideoAnswer

__all__ = ["Outcome", "Upload", "http_client", "upload_all"]


class Outcome(StrEnum):
    """The outcome of an upload."""

    ANSWERED = "answered"
    MISMATCHED = "mismatched"  # answered, but the tensors differ in the engine
    REFUSED = "refused"  # status 4xx, because of the file
    FAILED = "failed"  # status 5xx, because of the server or the engine
    LOST = "lost"  # no answer


@dataclass(frozen=True, slots=True)
class Upload:
    """A completed upload.

    Attributes:
        clip: the uploaded file.
        outcome: the outcome.
        answer: the answer of the server; None without one.
        reason: the reason for a failure; empty otherwise.
    """

    clip: Path
    outcome: Outcome
    answer: VideoAnswer | None = None
    reason: str = ""


def http_client(base_url: str) -> httpx.AsyncClient:
    """Return a client without timeouts, and without the proxies of the environment."""
    # Each upload has its own connection, as if from another user: a connection stays with its worker.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False)  # noqa: S113


async def upload_all(
    client: httpx.AsyncClient,
    clips: Sequence[Path],
    *,
    concurrency: int,
    on_done: Callable[[Upload], None],
) -> list[Upload]:
    """Upload files, and return the outcomes.

    Args:
        client: a client of the API server.
        clips: the files; a file that is listed twice is uploaded twice.
        concurrency: the maximum number of concurrent uploads.
        on_done: called after each upload.
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
        return Upload(
            clip, Outcome.MISMATCHED, answer, "the tensors in the engine differ from those that were sent"
        )
    outcome = Outcome.REFUSED if response.is_client_error else Outcome.FAILED
    return Upload(clip, outcome, reason=f"{_detail(response)} (status {response.status_code})")


def _detail(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content, type=dict[str, object])["detail"])
    except (msgspec.MsgspecError, KeyError):  # the response is not an error of the demo's server
        return response.text or response.reason_phrase
