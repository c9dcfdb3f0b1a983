"""Turn this process into the first process of a container, and run its program.

`unshare` has already created its PID, mount and IPC namespaces. The only argument is a `Spec` as JSON.
"""

import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.deployment.seccomp import forbid_what_docker_forbids
from verification.networks import Host

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_LAST_CAPABILITY = 40
_SHM_BYTES = 64 << 20  # of `/dev/shm`, as in Docker

_ROOT = str(Path(__file__).parents[2])
# The image: what the program consists of. A folder precedes those in it, which may be an environment.
_PROGRAM = sorted({_ROOT, sys.prefix, sys.base_prefix})


class Spec(msgspec.Struct, frozen=True):
    """A container: what a runtime such as Docker sets up for its first process."""

    command: list[str]
    folder: str  # its working directory, which is readable in the container
    environment: dict[str, str] = {}
    user: int = 10001  # and its group; the process has no capabilities unless this is 0
    mounts: dict[str, str] = {}  # of the host, by their paths in the container; those in `/run` may be new
    host: Host | None = None  # its network; None for that of the caller


def main(spec: Spec) -> None:
    """Set up the container, and replace this process by the program."""
    if spec.host is not None:
        spec.host.enter()
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", f"size={_SHM_BYTES}", "shm", "/dev/shm")
    # Where the home of root is closed, only the folders of the program are visible there.
    hidden = {"/run", *filter(None, (_closed(Path(folder)) for folder in _PROGRAM))}
    covered = [Path(place) for place in (*hidden, *spec.mounts)]
    program = [folder for folder in _PROGRAM if any(map(Path(folder).is_relative_to, covered))]
    # A mount may hide these.
    sources = [
        (place, os.open(source, os.O_PATH))
        for place, source in (*spec.mounts.items(), *zip(program, program, strict=True))
    ]
    for folder in hidden:
        _mount("-t", "tmpfs", "-o", "mode=755", "hidden", folder)
    for place, source in sources:
        _bind(source, Path(place))
    for folder in (*hidden, *program, "/"):
        _mount("-o", "remount,bind,ro", folder)
    os.chdir(spec.folder)
    _drop_privileges(spec.user)
    forbid_what_docker_forbids()
    os.execvpe(spec.command[0], spec.command, {**os.environ, **spec.environment})  # noqa: S606


def _closed(folder: Path) -> str | None:
    """Return the first folder on a path that other users may not enter."""
    for parent in (*reversed(folder.parents), folder):
        if not parent.stat().st_mode & stat.S_IXOTH:
            return str(parent)
    return None


def _bind(source: int, target: Path) -> None:
    """Mount an open file or folder of the host."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = f"/proc/self/fd/{source}"
    if os.path.isdir(path):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount("--no-canonicalize", "--bind", path, str(target), pass_fds=[source])
    os.close(source)


def _drop_privileges(user: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")


def _mount(*arguments: str, pass_fds: Sequence[int] = ()) -> None:
    subprocess.run(("mount", *arguments), check=True, pass_fds=pass_fds)  # noqa: S607 - of the system


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Spec))
