"""Checks of the software: Python's start method, torch, CUDA and uvloop."""

import re
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from aiotensor.cli.doctor.finding import Finding, Status, read
from aiotensor.cli.words import counted

__all__ = ["cuda", "event_loop", "release_of", "start_method", "torch_build", "torch_version"]

_OLDEST_TORCH = (2, 6)
_OLDEST_UVLOOP = (0, 21)


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def start_method(methods: Sequence[str]) -> Finding:
    """Check the default start method: the first result of `multiprocessing.get_all_start_methods()`."""
    default = methods[0] if methods else "none"
    if default in ("spawn", "forkserver"):
        return Finding(Status.OK, f"multiprocessing uses {default} by default")
    return Finding(
        Status.NOTE,
        f"multiprocessing uses {default} by default; a forked process cannot use the aiotensor objects that "
        "it inherits",
        'If you use multiprocessing: multiprocessing.get_context("spawn").Process(...)',
    )


def torch_version() -> Finding:
    """Import torch, and check its version."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        advice = "Install it: pip install 'torch>=2.6'"
        reason = " ".join(str(error).split())  # some have several lines
        return Finding(Status.PROBLEM, f"cannot be imported: {reason}", advice)
    return torch_build(torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)


def torch_build(release: str, *, cuda: str | None, hip: str | None) -> Finding:
    """Check a release of torch, and report the versions of CUDA or ROCm (hip) with which it was built."""
    kind = f"built with CUDA {cuda}" if cuda else f"built with ROCm {hip}" if hip else "built for the CPU"
    if release_of(release) < _OLDEST_TORCH:
        return Finding(Status.PROBLEM, f"{release}, {kind}: too old", "Update it: pip install 'torch>=2.6'")
    return Finding(Status.OK, f"{release}, {kind}")


def event_loop() -> Finding:
    """Import uvloop, which is optional, and check its version."""
    try:
        import_module("uvloop")
        installed = version("uvloop")
    except ImportError:  # which PackageNotFoundError is, too
        found = "cannot be imported; asyncio's own event loop works too"
        return Finding(Status.NOTE, found, "For speed: pip install uvloop")
    if release_of(installed) < _OLDEST_UVLOOP:
        return Finding(Status.NOTE, f"{installed}: too old", "Update it: pip install 'uvloop>=0.21'")
    return Finding(Status.OK, f"{installed}; used only if the application selects it")


def cuda(root: Path = Path("/")) -> Finding:
    """Report the GPUs that torch can use, with names from the driver, so that no GPU is initialized."""
    try:
        import torch
    except (ImportError, OSError):
        return Finding(Status.OK, "unknown without torch; not needed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch reports in a warning why it cannot use a GPU
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = _names_of_gpus(root)
    here = f"; in this machine: {', '.join(names)}" if names else ""
    if count:
        return Finding(Status.OK, f"torch can use {counted(count, 'GPU')}, none is needed{here}")
    found = f"torch can use no GPU, none is needed{here}"
    if caught:
        reason = " ".join(str(caught[0].message).partition("(Triggered")[0].split())
        return Finding(Status.NOTE, f"{found}; torch reports: {reason}", "To use a GPU, check its driver")
    if names:
        advice = "To use a GPU, install a build of torch with CUDA, and check CUDA_VISIBLE_DEVICES"
        return Finding(Status.NOTE, found, advice)
    return Finding(Status.OK, found)


def _names_of_gpus(root: Path) -> list[str]:
    texts = map(read, sorted(root.glob("proc/driver/nvidia/gpus/*/information")))
    return [name for text in texts for name in re.findall(r"^Model:\s*(.*\S)", text, re.MULTILINE)]
