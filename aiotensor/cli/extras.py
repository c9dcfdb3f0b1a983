"""Say in one sentence what to install when an optional dependency is missing. Needs none itself."""

from collections.abc import Iterable
from importlib.util import find_spec

__all__ = ["missing_extra"]


def missing_extra(command: str, modules: Iterable[str], *, extra: str) -> str | None:
    """Say which of these top-level modules are missing and how to get them; None if all are here."""
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    return f"`{command}` needs {', '.join(missing)}: pip install 'aiotensor[{extra}]'"
