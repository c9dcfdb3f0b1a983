"""Fresh processes in no time: a server that has imported torch, and nothing else, forks them.

Importing torch takes about a second, and a run starts hundreds of processes. `multiprocessing` has such a
fork server; what is added here is that the processes it started can start others from the same server.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from multiprocessing import reduction
from typing import Any

__all__ = ["Output", "Server", "adopt", "own_server"]

Server = str | None

_PRELOADED = ["torch", "numpy", "msgspec", "asyncio"]
# CPython's documentation says that a child of a fork server uses that server for its own children. It has
# the means to, and starts another server nevertheless. From 3.14 a server also asks who one is.
_CAN_BE_SHARED = sys.version_info < (3, 14)


def own_server() -> Server:
    """Start the server of this process, if it does not run yet, and say where it is."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    multiprocessing.forkserver.ensure_running()
    return _server()._forkserver_address if _CAN_BE_SHARED else None


def adopt(server: Server) -> None:
    """Let this process, which that server has started, start its own children from it too."""
    if server is None:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        return
    _server()._forkserver_address = server
    _server().ensure_running = lambda: None


def _server() -> Any:
    return vars(multiprocessing.forkserver)["_forkserver"]


class Output:
    """Make a descriptor the standard output and error of a process that is started with this as an argument.

    It must be the first argument: then whatever goes wrong from there, in unpickling the next ones too,
    is written to it.
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
