"""The modules that the library imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_importing_the_library_imports_no_optional_package() -> None:
    code = "import sys, aiotensor; print(*sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    imported = set(done.stdout.split())
    assert "aiotensor" in imported
    assert not imported & {*APPLICATIONS, "zmq", "aiotensor.cli"}


@pytest.mark.promise(24)
def test_only_the_executor_for_vllm_imports_pickle() -> None:
    importing = set()
    for path in (ROOT / "aiotensor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            if {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names):
                importing.add(path.relative_to(ROOT / "aiotensor").as_posix())
    assert importing == {"integrations/vllm/executor.py"}
