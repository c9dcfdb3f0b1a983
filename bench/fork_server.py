"""Start new processes quickly: a server that has imported only torch forks them.

Importing torch takes about a second, and a run starts hundreds of processes. `multiprocessing` has such a
fork server; this module lets the processes that it started start others from the same server.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from multiprocessing import reduction
from typing import Any

Server = str | None

_PRELOADED = ["torch", "numpy", "msgspec", "asyncio"]
# CPython's documentation says that a child of a fork server uses that server for its own children. It has
# the means to, but starts another server. From 3.14 a server also authenticates its clients.
_CAN_BE_SHARED = sys.version_info < (3, 14)


def own_server() -> Server:
    """Start the server of this process, if it does not run yet, and return its address."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    multiprocessing.forkserver.ensure_running()
    return _server()._forkserver_address if _CAN_BE_SHARED else None


def adopt(server: Server) -> None:
    """Start the children of this process from the server that has started it."""
    if server is None:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        return
    _server()._forkserver_address = server
    _server().ensure_running = lambda: None


def _server() -> Any:
    return vars(multiprocessing.forkserver)["_forkserver"]


class Output:
    """Redirect the standard output and error of a new process, which gets this object as an argument.

    It must be the first argument, so that errors while the others are unpickled are written to it, too.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _redirect, (reduction.DupFd(self._descriptor),)


def _redirect(sent: Any) -> None:
    descriptor = sent.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
