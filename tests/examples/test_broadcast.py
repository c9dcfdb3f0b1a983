"""The example of broadcast runs as its first comment shows."""

from pathlib import Path

import av
import numpy as np
import pytest

from demo.clips import sample_clips
from tests.examples.films import film
from tests.examples.programs import running, shown


async def run(folder: Path, *clips: Path) -> tuple[int, list[list[str]], str]:
    """Run it, and return its status, the words of each line of its output, and its errors."""
    command = shown("broadcast")[0]
    async with running([*command, *map(str, clips)], folder, PYTHONWARNINGS="error") as program:
        output, errors = await program.process.communicate()
        status = program.process.returncode
    assert status is not None
    return status, [line.split() for line in output.decode().splitlines()], errors.decode()


def brightness(clip: Path) -> tuple[int, float]:
    """Decode a clip, and return the number of its frames and their mean brightness."""
    with av.open(str(clip)) as video:
        frames = [frame.to_ndarray(format="rgb24")[::2, ::2] for frame in video.decode(video=0)]
    return len(frames), float(np.mean(frames, axis=(0, 1, 2)) @ (0.299, 0.587, 0.114))


def row(table: list[list[str]], name: str) -> list[float]:
    """Return the numbers in the row with a name."""
    [cells] = [cells for first, *cells in filter(None, table) if first == name]
    return [float(cell) for cell in cells]


async def test_three_engines_receive_every_frame_unchanged(folder: Path) -> None:
    status, table, errors = await run(folder)

    assert (status, errors) == (0, "")
    batches = 0
    for clip in sample_clips():
        frames, mean, _, activation = row(table, clip.name)
        assert (frames, mean) == pytest.approx(brightness(clip), abs=0.01)
        assert activation > 0
        batches += -(-int(frames) // 16)
    for engine in ("brightness", "motion", "network"):
        assert row(table, engine) == [batches, 0, batches]  # none was missed or changed


async def test_the_motion_of_a_film_is_the_change_between_its_frames(folder: Path) -> None:
    moving, still = folder / "moving.mkv", folder / "still.mkv"
    film(moving, 40)
    film(still, 1)
    status, table, errors = await run(folder, moving, still)

    assert (status, errors) == (0, "")
    frames, _, motion, _ = row(table, "moving.mkv")
    assert frames == 40
    assert motion > 1  # each frame is brighter by 1 than the one before, except where it wraps around
    assert row(table, "still.mkv")[2] == 0


async def test_a_file_that_is_not_a_video_ends_all_processes_with_an_error(folder: Path) -> None:
    status, table, errors = await run(folder, Path(__file__))

    assert (status, table) == (1, [])
    assert "test_broadcast.py" in errors
    assert "Traceback" not in errors
