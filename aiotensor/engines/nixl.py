"""NIXL (https://github.com/ai-dynamo/nixl): moves bytes with UCX, over RDMA where there is hardware for it.

This uses only the compiled part of NIXL. The Python part changes the configuration of `logging` when it is
imported, and unpickles data of peers.

These properties of NIXL 1.5 determine the code:

- A READ requires that the process with the bytes makes progress, and UCX aborts that process if the reader
  dies in the meantime. A WRITE has neither problem, so the side that has the bytes writes them.
- A transfer cannot be cancelled: after its release, bytes are still read and written.
- The metadata of registered memory cannot be replaced at a peer, even if the memory was unregistered. So each
  registration has its own number, passed as the device id, which has no meaning for host memory.
- Two threads may use one agent only in the synchronization mode STRICT.
"""

import ctypes
import os
import resource
import secrets
import struct
import sys
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from aiotensor.engines.base import EngineError, RegistrationError

__all__ = ["NixlEngine", "load"]

_PACKAGES = "nixl_cu12", "nixl_cu13"  # equivalent for memory of the host

# UCX reads these when it is loaded. By default it writes to standard output, handles fatal signals, replaces
# functions of the C library such as `mmap`, and warns about variables that other programs use.
_WHILE_LOADING = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_MEM_EVENTS": "n",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

# Environment variables override these settings. UCX must not use its shared memory: a killed process would
# leave its files, and a peer could still write to this process after `close`. Over TCP, messages are larger
# than the default of 8 KiB, which is slow, and keep-alive messages detect a dead host, which would otherwise
# take two hours.
_UCX = "TLS=^sm,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k,TCP_KEEPIDLE=5s,TCP_KEEPINTVL=2s,TCP_KEEPCNT=3"

# An agent and its connection need 17 to 25 descriptors. UCX aborts the process if none are left.
_LEAST_DESCRIPTORS = 64

_KEY = struct.Struct("<QQQ")  # address, bytes and number of a registration; its metadata follow
_MOST_KEYS = 4096  # the maximum number of keys of the peer whose metadata are kept

_loading = threading.Lock()
_making = threading.Lock()  # another agent must not take the descriptors that were counted
_library: ModuleType | None = None
_errors: tuple[type[BaseException], ...] = (RuntimeError,)
_agents: "weakref.WeakSet[Any]" = weakref.WeakSet()


class NixlEngine:
    """A NIXL agent with one peer, as an `Engine`; call `load` first.

    Raises:
        EngineError: NIXL cannot be used on this machine.
    """

    def __init__(self) -> None:
        nixl = self._nixl = load()
        config = nixl.nixlAgentConfig()
        config.useProgThread = False  # it would poll all the time
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        with _translated("NIXL cannot be used in this process"), _making:
            _check_descriptors()
            self._agent = nixl.nixlAgent(secrets.token_hex(16), config)
            self._backends = [self._agent.createBackend("UCX", {"engine_config": _UCX})]
            self.address: bytes = self._agent.getLocalPartialMD(
                nixl.nixlRegDList(nixl.DRAM_SEG, 0), True, self._backends
            )
        _agents.add(self._agent)
        self._peer = b""
        self._peer_address = b""
        self._registrations = 0  # the number of registrations so far
        self._registered: dict[bytes, tuple[Any, memoryview]] = {}
        self._known: set[bytes] = set()  # keys of the peer
        self._writes: dict[int, tuple[Any, memoryview]] = {}  # the source of each, with its registration

    def connect(self, address: bytes) -> None:
        """Set the peer, as `Engine.connect` does."""
        _check_descriptors()
        with _translated("the address of the peer is unusable"):
            self._peer = self._agent.loadRemoteMD(address)
        self._peer_address = address

    def register(self, memory: memoryview) -> bytes:
        """Allow the peer to write to memory, as `Engine.register` does."""
        registration, number = self._register(memory)
        with _translated("memory cannot be described"):
            metadata: bytes = self._agent.getLocalPartialMD(registration, False, self._backends)
        key = _KEY.pack(_address_of(memory), len(memory), number) + metadata
        self._registered[key] = registration, memory
        return key

    def unregister(self, key: bytes) -> None:
        """End a registration, as `Engine.unregister` does."""
        with _translated("memory cannot be unregistered"):
            registration, _ = self._registered[key]
            self._agent.deregisterMem(registration, self._backends)
            del self._registered[key]

    def write(self, source: memoryview, key: bytes, start: int) -> Hashable:
        """Begin to write to memory of the peer, as `Engine.write` does."""
        if len(key) < _KEY.size:
            raise EngineError("the key of the peer is too short")
        address, nbytes, number = _KEY.unpack_from(key)
        if start + len(source) > nbytes:
            raise EngineError(f"{len(source)} bytes at {start} exceed the memory of {nbytes} bytes")
        nixl = self._nixl
        with _translated("starting a write failed"):
            self._learn(key)
        registration, own_number = self._register(source)
        with _translated("starting a write failed"):
            there = nixl.nixlXferDList(nixl.DRAM_SEG, 0)
            there.addDesc((address + start, len(source), number))
            here = nixl.nixlXferDList(nixl.DRAM_SEG, 0)
            here.addDesc((_address_of(source), len(source), own_number))
            try:
                request: int = self._agent.createXferReq(
                    nixl.NIXL_WRITE, here, there, self._peer, "", self._backends
                )
            except BaseException:
                self._agent.deregisterMem(registration, self._backends)
                raise
            self._writes[request] = registration, source  # even if this fails: bytes may be under way
            self._agent.postXferReq(request)
        return request

    def poll(self) -> list[tuple[Hashable, str]]:
        """Make progress once, as `Engine.poll` does."""
        with _translated("making progress failed"):
            self._agent.getNotifs({}, self._backends)  # makes progress; there are no notifications
        ended: list[tuple[Hashable, str]] = []
        for request in list(self._writes):
            reason = ""
            try:
                status = self._agent.getXferStatus(request)
                if status == self._nixl.NIXL_IN_PROG:
                    continue
                if status != self._nixl.NIXL_SUCCESS:
                    reason = f"it ended with {status}"
            except _errors as error:
                reason = str(error) or type(error).__name__
            registration, _ = self._writes.pop(request)
            with _translated("finishing a write failed"):
                self._agent.releaseXferReq(request)
                self._agent.deregisterMem(registration, self._backends)
            ended.append((request, reason))
        return ended

    def close(self) -> None:
        """Stop all writes, as `Engine.close` does; blocks the interpreter for a few milliseconds."""
        _agents.discard(self._agent)
        self._agent = None
        self._registered.clear()
        self._writes.clear()

    def _register(self, memory: memoryview) -> tuple[Any, int]:
        self._registrations += 1
        registration = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, 0)
        registration.addDesc((_address_of(memory), len(memory), self._registrations, ""))
        with _translated("memory cannot be registered", RegistrationError):
            self._agent.registerMem(registration, self._backends)
        return registration, self._registrations

    def _learn(self, key: bytes) -> None:
        """Load the metadata of a key, and forget all others if there are many."""
        if key in self._known:
            return
        if len(self._known) >= _MOST_KEYS and not self._writes:
            self._agent.invalidateRemoteMD(self._peer)
            self._known.clear()
            self.connect(self._peer_address)
        if self._agent.loadRemoteMD(key[_KEY.size :]) != self._peer:
            raise EngineError("the peer sent the key of another process")
        self._known.add(key)


def _check_descriptors() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = limit - len(os.listdir("/proc/self/fd"))
    if left < _LEAST_DESCRIPTORS:
        raise EngineError(
            f"NIXL needs {_LEAST_DESCRIPTORS} file descriptors, but {left} are left (ulimit -n)"
        )


def load() -> Any:
    """Return the compiled part of NIXL, which the first call loads.

    Raises:
        EngineError: NIXL is not installed, or cannot be loaded.
    """
    global _library, _errors
    with _loading:
        if _library is None:
            _library = _loaded()
            _errors += tuple(
                each
                for each in vars(_library).values()
                if isinstance(each, type) and issubclass(each, Exception)
            )
    return _library


def _loaded() -> ModuleType:
    for package in _PACKAGES:
        name = f"{package}._bindings"
        if name in sys.modules:
            return sys.modules[name]
        found = find_spec(package)
        if found is None or not found.origin:
            continue
        for path in Path(found.origin).parent.glob("_bindings.*.so"):
            # It is loaded under its own name, because its types can be registered only once.
            spec = spec_from_loader(name, ExtensionFileLoader(name, str(path)))
            if spec is None or spec.loader is None:
                raise AssertionError("a loader was given")
            try:
                with _environment(_WHILE_LOADING):
                    module = module_from_spec(spec)
                    spec.loader.exec_module(module)
                    config = module.nixlAgentConfig()
                    module.nixlAgent(secrets.token_hex(16), config).getPluginParams("UCX")  # loads UCX
            except Exception as error:
                raise EngineError(f"NIXL cannot be loaded: {error}") from error
            sys.modules[name] = module
            return module
    raise EngineError("NIXL is not installed: pip install nixl-cu12")


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set missing environment variables for the duration of a block, so that children do not inherit them."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _translated(what: str, kind: type[EngineError] = EngineError) -> Iterator[None]:
    try:
        yield
    except _errors as error:
        raise kind(f"{what}: {error}") from error


def _address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def _keep_in_child() -> None:
    """Keep the agents of the parent in a child: destroying one would end its connections in the parent."""
    global _loading, _making
    _loading, _making = threading.Lock(), threading.Lock()  # another thread may hold these at the fork
    for agent in _agents:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


os.register_at_fork(after_in_child=_keep_in_child)
