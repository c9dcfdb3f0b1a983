"""Checks of the software: Python's start method, torch, CUDA, uvloop and NIXL."""

import re
import resource
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from aiotensor.cli.doctor.finding import Finding, Status, read
from aiotensor.cli.words import counted, in_words
from aiotensor.engines import EngineError, engine_maker

__all__ = ["cuda", "event_loop", "nixl", "release_of", "start_method", "torch_build", "torch_version"]

_OLDEST_TORCH = (2, 6)
_OLDEST_UVLOOP = (0, 21)
_TRIAL_BYTES = 1 << 20


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


def nixl(locked_bytes: int, root: Path = Path("/"), trial_s: float = 5.0) -> Finding:
    """Write from one engine of NIXL to another, and look for RDMA devices.

    Args:
        locked_bytes: the limit of locked memory in bytes; RDMA devices require that memory is locked.
        root: the root of the file system.
        trial_s: the time limit for the write in seconds.
    """
    devices = sorted(path.name for path in root.glob("sys/class/infiniband/*"))
    what = f"RDMA devices: {', '.join(devices)}" if devices else "this machine has no RDMA device"
    try:
        _try_nixl(trial_s)
    except EngineError as error:
        if not devices:
            return Finding(Status.OK, f"not usable, and not needed: {what}; {error}")
        return Finding(Status.NOTE, f"not usable: {error}; {what}", "For RDMA: pip install nixl-cu12")
    if devices and locked_bytes != resource.RLIM_INFINITY:
        found = f"works; {what}; a process may lock {in_words(locked_bytes)} of memory for them"
        return Finding(Status.NOTE, found, "Raise the limit to the arena_bytes of all senders: ulimit -l")
    return Finding(Status.OK, f"works; {what}")


def _try_nixl(trial_s: float) -> None:
    make = engine_maker("nixl")
    with ExitStack() as closing:
        engines = []
        for _ in range(2):
            engines.append(make())
            closing.callback(engines[-1].close)
        writer, reader = engines
        writer.connect(reader.address)
        reader.connect(writer.address)
        memory = bytearray(_TRIAL_BYTES)
        writer.write(memoryview(b"x" * _TRIAL_BYTES), reader.register(memoryview(memory)), 0)
        end = time.monotonic() + trial_s
        while not (ended := writer.poll()):
            reader.poll()
            if time.monotonic() > end:
                raise EngineError("a write did not finish")
        if ended[0][1] or not all(memory[:: _TRIAL_BYTES - 1]):
            raise EngineError(f"a write failed: {ended[0][1]}")


def _names_of_gpus(root: Path) -> list[str]:
    texts = map(read, sorted(root.glob("proc/driver/nvidia/gpus/*/information")))
    return [name for text in texts for name in re.findall(r"^Model:\s*(.*\S)", text, re.MULTILINE)]
