import io
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from demo.clips import sample_clips
from demo.decode import (
    DecodedVideo,
    EmptyVideoError,
    UnreadableVideoError,
    VideoSize,
    VideoTooLargeError,
    decode,
    measure,
)

RED, BLUE = (220, 20, 20), (20, 20, 220)
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def bikes() -> bytes:
    return sample_clips()[1].read_bytes()


# MP4 files contain the number of frames, and Matroska files do not.
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_decoded_frames_have_the_right_colours_and_times(
    make_video: Callable[..., bytes], container: str
) -> None:
    file = make_video([RED] * 3 + [BLUE] * 4, size=(64, 48), container=container)

    video = decode(io.BytesIO(file), max_bytes=PLENTY)

    assert video.frames.dtype == np.uint8
    assert video.frames.shape == (7, 48, 64, 3)
    assert video.times.dtype == np.float64
    np.testing.assert_allclose(video.times, np.arange(7) / 25, atol=0.001)
    expected = np.array([RED] * 3 + [BLUE] * 4)[:, None, None, :]
    assert np.abs(video.frames.astype(int) - expected).max() < 16  # the codec is lossy


def test_a_real_h264_clip_is_decoded_whole(bikes: bytes) -> None:
    video = decode(io.BytesIO(bikes), max_bytes=PLENTY)

    assert video.frames.shape == (250, 272, 640, 3)
    assert video.times[-1] == pytest.approx(9.96)


def test_a_stream_without_timestamps_is_timed_by_its_frame_rate(make_video: Callable[..., bytes]) -> None:
    video = decode(io.BytesIO(make_video([RED] * 5, container="m4v")), max_bytes=PLENTY)

    np.testing.assert_allclose(video.times, np.arange(5) / 25)


@pytest.mark.parametrize("container", ["mp4", "matroska", "m4v"])
def test_the_size_is_measured_before_decoding_for_every_container(
    make_video: Callable[..., bytes], container: str
) -> None:
    file = make_video([RED] * 3 + [BLUE] * 4, size=(64, 48), container=container)

    size = measure(io.BytesIO(file))

    assert size == VideoSize(frames=7, height=48, width=64)
    assert size.nbytes == 7 * (64 * 48 * 3 + 8)


def memory_for(frames: int) -> DecodedVideo:
    return DecodedVideo(
        frames=np.full((frames, 48, 64, 3), 99, np.uint8), times=np.full(frames, 99, np.float64)
    )


@pytest.mark.parametrize("frames", [5, 8])
def test_frames_are_decoded_into_the_given_memory(make_video: Callable[..., bytes], frames: int) -> None:
    file, into = make_video([RED] * 5), memory_for(frames)

    video = decode(io.BytesIO(file), max_bytes=PLENTY, into=into)

    np.testing.assert_array_equal(video.frames, decode(io.BytesIO(file), max_bytes=PLENTY).frames)
    assert video.frames.flags.c_contiguous
    assert np.shares_memory(video.frames, into.frames)
    assert np.shares_memory(video.times, into.times)
    np.testing.assert_allclose(into.times, [0, 0.04, 0.08, 0.12, 0.16] + [99] * (frames - 5), atol=0.001)
    assert (into.frames[5:] == 99).all()


def test_frames_that_exceed_the_given_memory_are_decoded_into_new_memory(
    make_video: Callable[..., bytes],
) -> None:
    file, into = make_video([RED] * 3 + [BLUE] * 4), memory_for(4)

    video = decode(io.BytesIO(file), max_bytes=PLENTY, into=into)

    np.testing.assert_array_equal(video.frames, decode(io.BytesIO(file), max_bytes=PLENTY).frames)
    assert len(video.times) == 7
    assert not np.shares_memory(video.frames, into.frames)
    assert not np.shares_memory(video.times, into.times)


def test_the_byte_limit_also_applies_with_given_memory(make_video: Callable[..., bytes]) -> None:
    file = io.BytesIO(make_video([RED] * 7))

    with pytest.raises(VideoTooLargeError, match="with 7 frames"):
        decode(file, max_bytes=6 * (64 * 48 * 3 + 8), into=memory_for(4))


@pytest.mark.parametrize("function", [measure, lambda file: decode(file, max_bytes=PLENTY)])
def test_a_file_can_be_measured_and_decoded_again_and_again(
    make_video: Callable[..., bytes], function: Callable[[io.BytesIO], object]
) -> None:
    file = io.BytesIO(make_video([RED] * 3))

    function(file)

    assert len(decode(file, max_bytes=PLENTY).frames) == 3


def test_measuring_a_file_that_is_not_a_video_raises_an_error() -> None:
    with pytest.raises(EmptyVideoError, match="empty"):
        measure(io.BytesIO(b""))
    with pytest.raises(UnreadableVideoError, match="not a video"):
        measure(io.BytesIO(b"just a letter to a friend\n" * 100))


def test_an_empty_file_raises_empty_video_error() -> None:
    with pytest.raises(EmptyVideoError, match="empty"):
        decode(io.BytesIO(b""), max_bytes=PLENTY)


def test_a_file_that_is_no_video_is_unreadable() -> None:
    with pytest.raises(UnreadableVideoError, match="not a video"):
        decode(io.BytesIO(b"just a letter to a friend\n" * 100), max_bytes=PLENTY)


def test_half_a_file_is_unreadable(bikes: bytes) -> None:
    with pytest.raises(UnreadableVideoError, match="damaged"):
        decode(io.BytesIO(bikes[: len(bikes) // 2]), max_bytes=PLENTY)


def test_a_file_damaged_in_the_middle_is_unreadable(bikes: bytes) -> None:
    damaged = bikes[:100_000] + b"\xff" * 20_000 + bikes[120_000:]

    with pytest.raises(UnreadableVideoError, match="damaged"):
        decode(io.BytesIO(damaged), max_bytes=PLENTY)


def test_a_file_without_a_video_stream_is_unreadable() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes(bytes(16000))

    with pytest.raises(UnreadableVideoError, match="no video stream"):
        decode(file, max_bytes=PLENTY)


def test_a_playlist_cannot_make_the_server_open_another_file(
    make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(make_video([RED] * 3))
    playlist = f"ffconcat version 1.0\nfile '{secret}'\n".encode()

    with pytest.raises(UnreadableVideoError):
        decode(io.BytesIO(playlist), max_bytes=PLENTY)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_decoding_stops_at_the_byte_limit(make_video: Callable[..., bytes], container: str) -> None:
    frame = 64 * 48 * 3 + 8
    file = make_video([RED] * 10, size=(64, 48), container=container)

    assert len(decode(io.BytesIO(file), max_bytes=10 * frame).frames) == 10
    with pytest.raises(VideoTooLargeError, match=f"with 10 frames of 64 x 48 .* {10 * frame - 1} bytes"):
        decode(io.BytesIO(file), max_bytes=10 * frame - 1)
    with pytest.raises(VideoTooLargeError, match=r"with 1 frames"):
        decode(io.BytesIO(file), max_bytes=frame - 1)


def test_decoding_can_be_aborted_between_frames(make_video: Callable[..., bytes]) -> None:
    frames_begun = 0

    def give_up_at_the_third() -> None:
        nonlocal frames_begun
        frames_begun += 1
        if frames_begun == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        decode(io.BytesIO(make_video([RED] * 10)), max_bytes=PLENTY, checkpoint=give_up_at_the_third)
    assert frames_begun == 3
