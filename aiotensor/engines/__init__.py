"""Engines that move bytes into the memory of another process, such as NIXL over RDMA.

Each is one module with one class, as `Engine` describes it, and one branch in `engine_maker`.
"""

from collections.abc import Callable

from aiotensor.engines.base import Engine, EngineError, RegistrationError

__all__ = ["Engine", "EngineError", "RegistrationError", "engine_maker"]


def engine_maker(name: str) -> Callable[[], Engine]:
    """Return a function that makes an engine; loads its library, which takes 0.1 s for the first time.

    Args:
        name: of the engine.

    Raises:
        EngineError: there is no such engine, or its library is not installed or cannot be loaded.
    """
    if name == "nixl":
        # Imported here: other processes do not load its library.
        from aiotensor.engines.nixl import NixlEngine, load

        load()
        return NixlEngine
    raise EngineError(f"there is no engine {name!r}")
