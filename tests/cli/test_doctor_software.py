"""The checks of Python, torch and GPUs."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aiotensor.cli.doctor import software
from aiotensor.cli.doctor.finding import Status
from aiotensor.cli.doctor.software import (
    cuda,
    event_loop,
    release_of,
    start_method,
    torch_build,
    torch_version,
)

Cuda = Callable[..., None]


@pytest.fixture
def cuda_is(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Make torch see this many GPUs, with a warning or not."""

    def make(count: int, *, warning: str | None = None) -> None:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, UserWarning, stacklevel=1)
            return count > 0

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


@pytest.fixture
def with_gpu(tmp_path: Path) -> Path:
    """The root of a machine with the driver of a GPU."""
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\n")
    (folder.parent / "0000:02:00.0" / "information").mkdir(parents=True)  # which cannot be read as a file
    return tmp_path


@pytest.mark.parametrize("default", ["spawn", "forkserver"])
def test_spawn_and_forkserver_are_fine(default: str) -> None:
    assert start_method([default, "fork"]).status is Status.OK


def test_fork_is_a_note_with_advice() -> None:
    finding = start_method(["fork", "spawn"])

    assert finding.status is Status.NOTE
    assert 'get_context("spawn")' in (finding.advice or "")


def test_a_python_without_any_way_to_start_processes_is_a_note() -> None:
    assert start_method([]).status is Status.NOTE


@pytest.mark.parametrize(
    ("release", "status"),
    [("2.6.0", Status.OK), ("2.13.0+cpu", Status.OK), ("3.0", Status.OK), ("2.5.1", Status.PROBLEM)],
)
def test_torch_must_be_new_enough(release: str, status: Status) -> None:
    assert torch_build(release, cuda=None, hip=None).status is status


@pytest.mark.parametrize(
    ("toolkit", "rocm", "kind"),
    [
        (None, None, "built for the CPU"),
        ("12.8", None, "built with CUDA 12.8"),
        (None, "6", "built with ROCm 6"),
    ],
)
def test_the_build_of_torch_is_named(toolkit: str | None, rocm: str | None, kind: str) -> None:
    assert torch_build("2.6.0", cuda=toolkit, hip=rocm).found == f"2.6.0, {kind}"


def test_the_torch_that_is_installed_is_fine() -> None:
    assert torch_version().status is Status.OK
    assert torch.__version__ in torch_version().found


def test_missing_torch_is_a_problem_of_torch_but_not_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    assert torch_version().status is Status.PROBLEM
    assert cuda().status is Status.OK


def test_an_old_uvloop_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_loop().status is Status.OK
    monkeypatch.setattr(software, "version", lambda _: "0.20.0")

    assert event_loop().status is Status.NOTE
    assert "0.20.0" in event_loop().found


def test_no_gpu_is_fine(cuda_is: Cuda, tmp_path: Path) -> None:
    cuda_is(0)

    assert cuda(tmp_path).status is Status.OK


@pytest.mark.parametrize(("count", "words"), [(1, "1 GPU,"), (2, "2 GPUs,")])
def test_gpus_are_counted_and_named(count: int, words: str, cuda_is: Cuda, with_gpu: Path) -> None:
    cuda_is(count)
    finding = cuda(with_gpu)

    assert finding.status is Status.OK
    assert words in finding.found
    assert finding.found.endswith("in this machine: NVIDIA H100 80GB HBM3")


def test_a_gpu_that_torch_cannot_use_is_a_note(cuda_is: Cuda, with_gpu: Path) -> None:
    cuda_is(0)
    finding = cuda(with_gpu)

    assert finding.status is Status.NOTE
    assert "NVIDIA H100" in finding.found


def test_a_warning_of_torch_about_a_gpu_is_reported_in_one_line(cuda_is: Cuda, tmp_path: Path) -> None:
    cuda_is(0, warning="The NVIDIA driver\nis too old. (Triggered internally at ../c10/cuda.cpp:109.)")
    finding = cuda(tmp_path)

    assert finding.status is Status.NOTE
    assert finding.found.endswith("torch reports: The NVIDIA driver is too old.")


def test_the_check_for_gpus_does_not_initialize_cuda() -> None:
    code = (
        "import torch; from aiotensor.cli.doctor.software import cuda; "
        "cuda(); raise SystemExit(torch.cuda.is_initialized())"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13)), ("6.18.44-fc", (6, 18)), ("3.0", (3, 0)), ("unknown", (0, 0)), ("7", (0, 0))],
)
def test_the_first_two_numbers_of_a_version_count(version: str, numbers: tuple[int, int]) -> None:
    assert release_of(version) == numbers
