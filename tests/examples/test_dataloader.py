"""The example of the DataLoader and the program of docs/dataloader.md run as shown."""

import re
from pathlib import Path

import av
import numpy as np
import pytest

import dataloader
from demo.clips import sample_clips
from tests.examples.films import film
from tests.examples.programs import ROOT, running, shown


async def output_of(command: list[str], folder: Path) -> list[str]:
    """Run a program, and return the lines of its output; warnings are errors."""
    async with running(command, folder, PYTHONWARNINGS="error") as program:
        output, errors = await program.process.communicate()
        assert (program.process.returncode, errors.decode()) == (0, "")
    return output.decode().splitlines()


async def test_both_ways_load_every_frame_of_every_clip(folder: Path) -> None:
    clips = [sample_clips()[-1], folder / "one.mkv", folder / "two.mkv"]
    film(clips[1], 40)
    film(clips[2], 70, height=180, width=320)
    frames = total = 0
    for clip in clips:
        with av.open(str(clip)) as video:
            for frame in video.decode(video=0):
                frames += 1
                total += int(frame.to_ndarray(format="rgb24")[::8, ::8].sum(dtype=np.int64))

    lines = await output_of([*shown("dataloader")[0], *map(str, clips)], folder)

    assert [line.partition(f": {frames} frames, sum {total}, ")[0] for line in lines] == [
        "handles",
        "tensors",
    ]


def test_a_loop_that_ends_early_ends_the_workers(folder: Path) -> None:
    films = [folder / "one.mkv", folder / "two.mkv"]
    for path in films:
        film(path, 200)
    loaded = dataloader.received(films)

    first = next(loaded)
    loaded.close()

    assert first.shape == (32, 360, 640, 3)


def test_an_unreadable_file_raises_the_error_of_its_worker(folder: Path) -> None:
    film(folder / "one.mkv", 5)
    (folder / "two.mkv").write_bytes(b"no video" * 100)

    with pytest.raises(RuntimeError, match="InvalidDataError in DataLoader worker process 1"):
        list(dataloader.received([folder / "one.mkv", folder / "two.mkv"]))


async def test_the_program_of_the_page_prints_what_it_shows(folder: Path) -> None:
    page = (ROOT / "docs" / "dataloader.md").read_text()
    [text] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)
    [printed] = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.M)
    program = folder / "program.py"
    program.write_text(text)

    assert await output_of(["python", str(program)], folder) == printed.splitlines()
