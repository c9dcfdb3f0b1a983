"""Each example runs as its first comment shows."""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from demo.clips import sample_clips
from tests.examples.films import film, is_right
from tests.examples.programs import PORTS, Site, engine, in_use, running, serving, shown

# Several tests share servers.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PORTS)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Run each example as shown, and check that it ends without errors."""
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        async with serving(request.param, Path(folder)) as site:
            yield site
            status, errors = await site.server.end(signal.SIGTERM)
            assert status == 0
            assert "Traceback" not in errors
            assert "ERROR" not in errors
            assert "ignored" not in errors


def assert_no_warnings(ended: tuple[int, str]) -> None:
    """Check that an engine has ended normally, and has only logged the ends of its clients."""
    status, errors = ended
    assert status == 0
    assert all(line.startswith("INFO:aiotensor.") for line in errors.splitlines()), errors


async def test_a_server_answers_uploads_of_any_kind_of_video_and_refuses_other_files(
    site: Site, folder: Path
) -> None:
    clips = sample_clips()  # some have their index at the end
    answers = await asyncio.gather(*[site.http.post(site.path, content=clip.read_bytes()) for clip in clips])
    for clip, answer in zip(clips, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert is_right(clip, answer.json())
    film(folder / "film.mkv", 5)
    no_text = (folder / "film.mkv").read_bytes().replace(b"Lavf", b"\xff\xfe\xff\xfe")  # in its metadata
    answer = await site.http.post(site.path, content=no_text)
    assert answer.status_code == 200, answer.text
    assert is_right(folder / "film.mkv", answer.json())
    refused = await site.http.post(site.path, content=b"no video" * 1000)
    assert refused.status_code == 400
    assert "no video" in refused.text
    body = clips[1].read_bytes()
    for _ in range(3):  # clients that disconnect halfway
        _, writer = await site.begin(f"Content-Length: {len(body)}")
        writer.write(body[: len(body) // 2])
        await writer.drain()
        writer.close()
    again = await site.http.post(site.path, content=clips[1].read_bytes())
    assert again.status_code == 200
    assert "aiotensor_sender_permits_limit" in (await site.http.get("/metrics")).text


async def test_the_batch_client_prints_a_line_for_each_file_and_fails_if_one_failed(folder: Path) -> None:
    _, [*command, _, _, _] = shown("batch_client")
    clips = [str(clip) for clip in sample_clips()]
    async with engine(folder) as owner:
        async with running(command + clips, folder) as program:
            output, errors = await program.process.communicate()
            assert (program.process.returncode, errors) == (0, b"")
            assert len(output.splitlines()) == len(clips)
        async with running([*command, clips[0], __file__], folder) as program:
            output, errors = await program.process.communicate()
            assert program.process.returncode == 1
            assert b"test_examples.py: this is no video" in errors
            assert len(output.splitlines()) == 1
        assert_no_warnings(await owner.end(signal.SIGINT))


@pytest.mark.parametrize("example", ["batching_engine", "gpu_engine"])
async def test_an_engine_that_batches_requests_answers_each_video(folder: Path, example: str) -> None:
    _, [*command, _, _, _] = shown("batch_client")
    clips = [str(clip) for clip in sample_clips()] * 2
    async with engine(folder) as owner:
        async with running(command + clips, folder) as program:
            expected, _ = await program.process.communicate()
        assert_no_warnings(await owner.end(signal.SIGINT))
    async with engine(folder, example) as owner:
        async with running(command + clips, folder) as program:
            output, errors = await program.process.communicate()
        assert (program.process.returncode, errors) == (0, b"")
        assert sorted(output.splitlines()) == sorted(expected.splitlines())
        assert await owner.end(signal.SIGINT) == (0, "")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0", "tcp://[::1]", "engine:7000", ""])
async def test_an_address_of_the_engine_without_a_scheme_or_port_is_rejected(
    folder: Path, address: str
) -> None:
    [command] = shown("engine")
    async with running(command, folder, ENGINE=address) as program:
        output, errors = await program.process.communicate()
        assert (program.process.returncode, output) == (1, b"")
        last = errors.decode().splitlines()[-1]
        assert (
            last == f"ValueError: ENGINE must be tcp://HOST:PORT, such as tcp://engine:7000, not {address!r}"
        )


@pytest.mark.parametrize("example", PORTS)
async def test_clients_that_disconnect_during_decoding_do_not_affect_the_server(
    example: str, folder: Path
) -> None:
    path = folder / "long.mkv"
    film(path, 60)
    body = path.read_bytes()
    async with serving(example, folder, is_one_process=True) as site:
        assert (await site.http.post(site.path, content=body)).status_code == 200
        for _ in range(5):
            for _ in range(4):
                _, writer = await site.begin(f"Content-Length: {len(body)}")
                writer.write(body[: len(body) * 3 // 4])
            while not await in_use(site):
                pass
            site.abort()
            while await in_use(site):
                pass
        assert (await site.http.post(site.path, content=body)).status_code == 200
