"""Every check, in the order in which they are shown."""

import multiprocessing
import platform
import resource
from pathlib import Path

from aiotensor.cli.doctor.finding import Finding
from aiotensor.cli.doctor.folder import default_folder, socket_file, socket_folder
from aiotensor.cli.doctor.kernel import kernel, shared_memory, unix_sockets
from aiotensor.cli.doctor.memory import (
    available_memory,
    cgroup_limit,
    dev_shm,
    huge_pages,
    mapped_bytes,
    open_files,
    process_limits,
)
from aiotensor.cli.doctor.software import cuda, event_loop, start_method, torch_version

__all__ = ["examine"]


def examine(arena_bytes: int, socket: Path | None) -> list[Finding]:
    """Examine this machine, as it is for this process.

    Args:
        arena_bytes: what one sender is to have in shared memory.
        socket: where a socket is to be; None looks at the usual folder only.
    """
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = default_folder() if socket is None else socket.parent
    return [
        kernel(platform.system(), platform.release()),
        shared_memory(),
        unix_sockets(),
        socket_folder(folder, asked_for=socket is not None),
        *([] if socket is None else [socket_file(socket)]),
        available_memory(arena_bytes),
        cgroup_limit(arena_bytes),
        process_limits(arena_bytes, address_space, mapped_bytes(), file_size),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        torch_version(),
        cuda(),
        start_method(multiprocessing.get_all_start_methods()),
        event_loop(),
        dev_shm(),
        huge_pages(),
    ]
