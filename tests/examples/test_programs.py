"""Each of the other examples runs as its first comment shows."""

import re
import signal
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from demo.clips import sample_clips
from tests.examples.films import film
from tests.examples.programs import Program, engine, running, shown
from tests.pages import LIMIT_S
from verification.places import free_port

pytestmark = [pytest.mark.extended, pytest.mark.timeout(LIMIT_S)]


async def output_of(command: list[str], folder: Path) -> list[str]:
    """Run a program, and return the lines of its output; warnings are errors."""
    async with running(command, folder, PYTHONWARNINGS="error") as program:
        status, output, errors = await result(program)
    assert (status, errors) == (0, "")
    return output.splitlines()


async def result(program: Program) -> tuple[int | None, str, str]:
    """Wait for the end of a program, and return its exit status, its output and its errors."""
    output, errors = await program.process.communicate()
    return program.process.returncode, output.decode(), errors.decode()


async def test_the_batch_client_and_each_engine_find_the_same_colours(folder: Path) -> None:
    _, [*command, _, _, _] = shown("batch_client")
    clips = [str(clip) for clip in sample_clips()[1:]]
    answers = []
    for example in ("engine", "batching_engine", "gpu_engine"):
        async with engine(folder, example) as owner:
            async with running([*command, *clips, __file__], folder) as program:
                status, output, errors = await result(program)
            assert status == 1
            assert "test_programs.py: this is no video" in errors
            answers.append(sorted(output.splitlines()))
            assert (await owner.end(signal.SIGINT))[0] == 0
    assert len(answers[0]) == len(clips)
    assert answers[0] == answers[1] == answers[2]


async def test_three_engines_receive_every_frame_unchanged(folder: Path) -> None:
    film(folder / "moving.mkv", 40)
    film(folder / "still.mkv", 1)
    clips = [str(folder / name) for name in ("moving.mkv", "still.mkv")]
    table = [line.split() for line in await output_of([*shown("broadcast")[0], *clips], folder)]
    rows = {
        first: [float(cell) for cell in cells]
        for first, *cells in filter(None, table[3:])
        if cells[0].isdigit()
    }
    for model in ("brightness", "motion", "network"):
        assert rows[model] == [4, 0, 4]  # none of the batches was missed or changed
    frames, brightness, motion, _ = rows["moving.mkv"]
    with av.open(clips[0]) as video:
        pictures = [frame.to_ndarray(format="rgb24")[::2, ::2] for frame in video.decode(video=0)]
    assert frames == 40
    assert brightness == pytest.approx(np.mean(pictures, axis=(0, 1, 2)) @ (0.299, 0.587, 0.114), abs=0.01)
    assert motion > 1  # each frame is brighter by 1 than the one before, except where it wraps around
    assert rows["still.mkv"][2] == 0


async def test_a_data_loader_loads_every_frame_with_handles_and_with_tensors(folder: Path) -> None:
    clips = [str(sample_clips()[-1]), str(folder / "film.mkv")]
    film(folder / "film.mkv", 70, height=180, width=320)
    frames = total = 0
    for clip in clips:
        with av.open(clip) as video:
            for frame in video.decode(video=0):
                frames += 1
                total += int(frame.to_ndarray(format="rgb24")[::8, ::8].sum(dtype=np.int64))
    lines = await output_of([*shown("dataloader")[0], *clips], folder)
    found = [line.partition(f": {frames} frames, sum {total}, ")[0] for line in lines]
    assert found == ["handles", "tensors"]


async def test_the_copies_to_a_gpu_are_compared_if_there_is_one(folder: Path) -> None:
    [first, *_] = await output_of(shown("gpu_copies")[0], folder)
    assert first.startswith("150 MiB to " if torch.cuda.is_available() else "there is no GPU")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")
def test_uploads_of_different_sizes_arrive_on_the_gpu_in_order() -> None:
    import gpu_engine  # the GPU is needed to create its events

    uploader = gpu_engine.Uploader(torch.device("cuda:0"))
    for number in range(50):
        source = torch.full((1 + number % 7, 1 << 20), number, dtype=torch.uint8)
        on_gpu = uploader.upload(source)
        source.fill_(255)  # as a sender does with the memory of a tensor that was freed
        assert bool((on_gpu == number).all())


async def test_a_trace_contains_the_spans_of_the_server_and_of_the_engine(folder: Path) -> None:
    lines = await output_of(shown("traced")[0], folder)
    spans = [re.fullmatch(r" *[\d.]+ ms +[\d.]+ ms  (.{10})  ( *)(.*)", line) for line in lines]
    assert [
        (span[1].strip(), len(span[2]) // 2, span[3].removeprefix("aiotensor ")) for span in spans if span
    ] == [
        ("API server", 0, "POST /videos"),
        ("API server", 1, "decode"),
        ("API server", 1, "request"),
        ("API server", 2, "wait for a permit"),
        ("API server", 2, "wait for memory"),
        ("API server", 2, "copy"),
        ("engine", 2, "deliver message"),
        ("engine", 2, "answer"),
        ("engine", 3, "forward"),
        ("API server", 3, "deliver answer"),
    ]


async def test_an_api_server_on_another_host_sends_its_videos_to_the_next_engine(folder: Path) -> None:
    make_keys, start_engine, start_api = (
        [word.replace("two_hosts/keys", f"{folder}/keys") for word in command]
        for command in shown("two_hosts/__init__")
    )
    port = free_port()
    assert await output_of(make_keys, folder) == []
    assert {path.stat().st_mode & 0o777 for path in (folder / "keys").iterdir()} == {0o600}
    start_engine += ["--port", str(port)]
    start_api += ["--port", str(port), "--videos", "30"]
    async with running(start_api, folder) as api:
        async with running(start_engine, folder) as engine:
            await engine.says("the engine is ready")
            await api.says("video")
        async with running(start_engine, folder):
            status, output, errors = await result(api)
    assert (status, errors) == (0, "")
    assert len(output.splitlines()) == 29
    assert "video 29: 60 frames, brightness 58.5" in output
