"""Describe the machine that the numbers come from."""

import os
import platform
from importlib import metadata
from pathlib import Path

from bench.records import Machine

_PACKAGES = ("aiotensor", "torch", "uvloop", "msgspec", "numpy", "pyzmq", "av", "iceoryx2")


def describe(load_before: float) -> Machine:
    """Gather what a reader needs to compare these numbers with others."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
        load_before=load_before,
        load_after=os.getloadavg()[0],
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of this folder" if package == "aiotensor" else "not installed"
