"""Adapters for web frameworks, vLLM and monitoring systems. Import each module by its full name."""

__all__ = ["not_installed"]


def not_installed(error: ModuleNotFoundError, needed_by: str, package: str = "") -> ModuleNotFoundError:
    """Return the error to raise in place of the error of an import.

    Its text names the missing package instead of an extra of aiotensor, because pip installs that package
    next to a wheel and next to a checkout alike.

    Args:
        error: the error of the import.
        needed_by: the name of the module that needs the package.
        package: the name that pip knows; by default, that of the module that was not found.
    """
    package = package or (error.name or str(error)).partition(".")[0]
    return ModuleNotFoundError(f"{needed_by} needs {package}: pip install {package}", name=error.name)
