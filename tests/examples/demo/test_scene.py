import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demo.clips import sample_clips
from demo.decode import decode
from demo.scene import SceneCuts

RED, BLUE = (220, 20, 20), (20, 20, 220)


def scenes(*lengths: int) -> torch.Tensor:
    """Frames that are red, then blue, then red again, and so on."""
    colours = [colour for index, n in enumerate(lengths) for colour in [(RED, BLUE)[index % 2]] * n]
    return torch.tensor(colours, dtype=torch.uint8)[:, None, None, :].expand(-1, 6, 8, -1)


def found(frames: torch.Tensor, model: SceneCuts | None = None) -> list[int]:
    times = torch.arange(len(frames), dtype=torch.float64) / 25
    return [cut.frame for cut in (model or SceneCuts()).find(frames, times)]


def test_a_video_of_two_colours_has_one_cut_where_the_colour_changes(
    make_video: Callable[..., bytes],
) -> None:
    video = decode(io.BytesIO(make_video([RED] * 10 + [BLUE] * 8)), max_bytes=1 << 30)

    [cut] = SceneCuts().find(torch.from_numpy(video.frames), torch.from_numpy(video.times))

    assert cut.frame == 10
    assert cut.seconds == pytest.approx(0.4, abs=0.001)
    assert cut.distance == 1.0


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=6),
    chunk=st.integers(1, 40),
)
def test_cuts_do_not_depend_on_how_the_frames_are_split_into_chunks(lengths: list[int], chunk: int) -> None:
    assert found(scenes(*lengths), SceneCuts(chunk=chunk)) == np.cumsum(lengths)[:-1].tolist()


def test_a_change_over_two_frames_is_one_cut() -> None:
    frames = scenes(5, 5).clone()
    frames[5, :, :4] = torch.tensor(RED, dtype=torch.uint8)  # half of the first blue frame is still red

    assert found(frames) == [5]


def test_motion_within_a_scene_is_not_a_cut() -> None:
    frames = scenes(20).clone()
    for index in range(20):
        frames[index, :, index % 8] = torch.tensor(BLUE, dtype=torch.uint8)

    assert found(frames) == []


def test_a_single_frame_has_no_cut() -> None:
    assert found(scenes(1)) == []


def test_the_cuts_of_a_real_clip_are_found() -> None:
    with sample_clips()[1].open("rb") as file:
        video = decode(file, max_bytes=1 << 30)

    assert found(torch.from_numpy(video.frames)) == [30, 76, 137, 187, 242]


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(4, 6, 8, 3),
        torch.zeros(4, 6, 8, dtype=torch.uint8),
        torch.zeros(4, 3, 6, 8, dtype=torch.uint8),
    ],
)
def test_tensors_that_are_not_frames_raise_value_error(frames: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected uint8 frames"):
        found(frames)


def test_a_video_needs_one_time_for_each_frame() -> None:
    with pytest.raises(ValueError, match="one time for each of 4 frames"):
        SceneCuts().find(scenes(4), torch.zeros(3, dtype=torch.float64))


def test_the_search_can_be_aborted_between_chunks() -> None:
    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        SceneCuts().find(scenes(4), torch.zeros(4, dtype=torch.float64), give_up)
