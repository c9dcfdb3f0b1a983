"""The modules that an import of the library loads, and the public interface of each module."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import aiotensor

ROOT = Path(__file__).parent.parent
APPLICATIONS = [
    "uvloop",
    "fastapi",
    "starlette",
    "pydantic",
    "pydantic_core",
    "uvicorn",
    "rich",
    "click",
    "av",
    "skvideo",
    "prometheus_client",
    "pytest",
    "opentelemetry",
]

MODULES = [
    module.name
    for module in pkgutil.walk_packages(aiotensor.__path__, "aiotensor.")
    # The executor derives from a class of vLLM; `make test-vllm` imports it.
    if not module.name.startswith(("aiotensor.cli", "aiotensor.integrations.vllm.executor"))
]


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules of a process that has imported aiotensor and nothing else."""
    code = "import sys, aiotensor; print(*sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("name", [*APPLICATIONS, "zmq", "aiotensor.cli"])
def test_importing_the_library_imports_no_optional_package(name: str, imported: set[str]) -> None:
    assert "aiotensor" in imported
    assert name not in imported


def test_public_names_are_sorted_and_documented() -> None:
    assert aiotensor.__all__ == sorted(aiotensor.__all__)
    for name in aiotensor.__all__:
        assert getattr(aiotensor, name).__doc__


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_docstring_and_a_valid_public_interface(name: str) -> None:
    module = importlib.import_module(name)

    assert module.__doc__
    if hasattr(module, "__all__"):
        assert all(hasattr(module, public) for public in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)
    else:  # a package whose modules are imported by name
        assert hasattr(module, "__path__")
        names = {name for name in vars(module) if not name.startswith("__")}
        assert names <= {found.name for found in pkgutil.iter_modules(module.__path__)}


def test_the_library_is_marked_as_typed() -> None:
    assert (Path(aiotensor.__file__).parent / "py.typed").exists()
