"""Engines that move bytes into the memory of another process, such as NIXL over RDMA.

Each engine is a class that implements `Engine`, in its own module, and has a branch in `engine_maker`.
"""

from collections.abc import Callable

from aiotensor.engines.base import Engine, EngineError, RegistrationError

__all__ = ["Engine", "EngineError", "RegistrationError", "engine_maker"]


def engine_maker(name: str) -> Callable[[], Engine]:
    """Load the library of an engine, and return a function that creates the engine.

    Loading takes 0.1 s the first time.

    Args:
        name: the name of the engine.

    Raises:
        EngineError: there is no such engine, or its library is not installed or cannot be loaded.
    """
    if name == "nixl":
        # Imported here, so that other processes do not load its library.
        from aiotensor.engines.nixl import NixlEngine, load

        load()
        return NixlEngine
    raise EngineError(f"unknown engine {name!r}")
