"""No data from a peer is unpickled."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "aiotensor"


def test_only_the_broadcast_for_vllm_imports_pickle() -> None:
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            if {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names):
                importing.add(path.relative_to(PACKAGE).as_posix())
    assert importing == {"integrations/vllm/pickling.py"}
