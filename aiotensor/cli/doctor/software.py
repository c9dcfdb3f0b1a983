"""What runs on the machine: Python's way to start processes, torch, CUDA and uvloop."""

import re
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from aiotensor.cli.doctor.finding import Finding, Status, release_of

__all__ = ["cuda", "event_loop", "start_method", "torch_build", "torch_version"]

_OLDEST_TORCH = (2, 6)
_OLDEST_UVLOOP = (0, 21)


def start_method(methods: Sequence[str]) -> Finding:
    """Check how multiprocessing starts processes unless it is told.

    Args:
        methods: as `multiprocessing.get_all_start_methods()` has them, the default first.
    """
    default = methods[0] if methods else "none"
    if default in ("spawn", "forkserver"):
        return Finding("start method", Status.OK, f"multiprocessing uses {default} by default")
    return Finding(
        "start method",
        Status.NOTE,
        f"multiprocessing uses {default} by default; what a forked process inherits of aiotensor is useless",
        'If you use multiprocessing: multiprocessing.get_context("spawn").Process(...)',
    )


def torch_version() -> Finding:
    """Import torch, and check its version."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        advice = "Install it: pip install 'torch>=2.6'"
        reason = " ".join(str(error).split())  # some of them are long
        return Finding("torch", Status.PROBLEM, f"cannot be imported: {reason}", advice)
    return torch_build(torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)


def torch_build(release: str, *, cuda: str | None, hip: str | None) -> Finding:
    """Check a version of torch.

    Args:
        release: the version of torch itself.
        cuda: the version of CUDA that it was built with, if any.
        hip: the version of ROCm that it was built with, if any.
    """
    kind = f"built with CUDA {cuda}" if cuda else f"built with ROCm {hip}" if hip else "built for the CPU"
    if release_of(release) < _OLDEST_TORCH:
        advice = "Update it: pip install 'torch>=2.6'"
        return Finding("torch", Status.PROBLEM, f"{release}, {kind}: too old", advice)
    return Finding("torch", Status.OK, f"{release}, {kind}")


def event_loop() -> Finding:
    """Import uvloop, which is optional, and check its version."""
    try:
        import_module("uvloop")
        installed = version("uvloop")
    except ImportError:  # which PackageNotFoundError is, too
        found = "cannot be imported; asyncio's own event loop works too"
        return Finding("uvloop", Status.NOTE, found, "For speed: pip install 'aiotensor[uvloop]'")
    if release_of(installed) < _OLDEST_UVLOOP:
        advice = "Update it: pip install 'aiotensor[uvloop]'"
        return Finding("uvloop", Status.NOTE, f"{installed}: too old", advice)
    return Finding("uvloop", Status.OK, f"{installed}; the application chooses it, aiotensor never does")


def cuda(root: Path = Path("/")) -> Finding:
    """Say which GPUs torch can use. None is fine, and none is started: names are read from the driver.

    Args:
        root: where `proc` is.
    """
    try:
        import torch
    except (ImportError, OSError):
        return Finding("CUDA", Status.OK, "not known without torch; not needed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # so torch says why it cannot use a GPU that is there
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = _names_of_gpus(root)
    here = f"; in this machine: {', '.join(names)}" if names else ""
    if count:
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        return Finding("CUDA", Status.OK, f"torch can use {gpus}, none is needed{here}")
    found = f"torch can use no GPU, none is needed{here}"
    if caught:
        reason = " ".join(str(caught[0].message).partition("(Triggered")[0].split())
        advice = "If you want it, see to the driver"
        return Finding("CUDA", Status.NOTE, f"{found}; it says: {reason}", advice)
    if names:
        advice = "If you want it, install a torch that is built with CUDA, and look at CUDA_VISIBLE_DEVICES"
        return Finding("CUDA", Status.NOTE, found, advice)
    return Finding("CUDA", Status.OK, found)


def _names_of_gpus(root: Path) -> list[str]:
    names = []
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        try:
            text = file.read_text()
        except OSError:
            continue
        names += re.findall(r"^Model:\s*(.*\S)", text, re.MULTILINE)
    return names
