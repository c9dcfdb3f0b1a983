from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from demo.messages import Fingerprint, VideoAnswer
from demo.uploads import Outcome, Upload, upload_all

SENT = (Fingerprint("float64", (2,), 1), Fingerprint("uint8", (2, 4, 4, 3), 2))


def answer(received: tuple[Fingerprint, Fingerprint]) -> httpx.Response:
    body = VideoAnswer("clip.mp4", 7, 112, 0.1, 0.1, 0.1, 0.1, sent=SENT, received=received, cuts=[])
    return httpx.Response(200, content=msgspec.json.encode(body))


async def upload_to(handler: Callable[[httpx.Request], httpx.Response], clip: Path) -> Upload:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server") as client:
        [upload] = await upload_all(client, [clip], concurrency=4, on_done=lambda _: None)
    return upload


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"video")
    return path


async def test_an_answer_with_equal_fingerprints_counts_as_answered(clip: Path) -> None:
    upload = await upload_to(lambda _: answer(received=SENT), clip)

    assert upload.outcome is Outcome.ANSWERED
    assert upload.answer is not None
    assert upload.reason == ""


@pytest.mark.parametrize(
    "received",
    [
        (SENT[0], Fingerprint("uint8", (2, 4, 4, 3), 3)),
        (SENT[0], Fingerprint("uint8", (2, 4, 3, 4), 2)),
        (SENT[0], Fingerprint("int8", (2, 4, 4, 3), 2)),
        (Fingerprint("float64", (2,), 0), SENT[1]),
    ],
    ids=["bytes", "shape", "dtype", "other tensor"],
)
async def test_a_difference_in_either_tensor_is_a_mismatch(
    clip: Path, received: tuple[Fingerprint, Fingerprint]
) -> None:
    upload = await upload_to(lambda _: answer(received=received), clip)

    assert upload.outcome is Outcome.MISMATCHED
    assert upload.reason


async def test_a_broken_connection_is_a_lost_upload(clip: Path) -> None:
    def break_off(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("Server disconnected", request=request)

    upload = await upload_to(break_off, clip)

    assert upload.outcome is Outcome.LOST
    assert upload.reason == "no answer: Server disconnected"


@pytest.mark.parametrize(
    ("response", "outcome", "reason"),
    [
        (httpx.Response(400, json={"detail": "no video"}), Outcome.REFUSED, "no video (status 400)"),
        (httpx.Response(503, json={"detail": "no engine"}), Outcome.FAILED, "no engine (status 503)"),
        (httpx.Response(500, text="Oops"), Outcome.FAILED, "Oops (status 500)"),
        (httpx.Response(404, json={}), Outcome.REFUSED, "{} (status 404)"),
    ],
)
async def test_a_4xx_refuses_the_file_and_a_5xx_is_a_failure(
    clip: Path, response: httpx.Response, outcome: Outcome, reason: str
) -> None:
    upload = await upload_to(lambda _: response, clip)

    assert (upload.outcome, upload.reason) == (outcome, reason)


async def test_a_file_that_vanished_meanwhile_is_refused_with_the_reason(tmp_path: Path) -> None:
    upload = await upload_to(lambda _: answer(received=SENT), tmp_path / "gone.mp4")

    assert upload.outcome is Outcome.REFUSED
    assert upload.reason == "the file cannot be read: No such file or directory"
