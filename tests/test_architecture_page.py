"""docs/architecture.md matches the code: its modules, its names and its diagrams exist."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aiotensor"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FENCE = re.compile(r"(?:<!-- from (\S+) -->\n)?```text\n(.*?)```", re.DOTALL)
QUOTED = set(re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGE)))
FILES = {quoted for quoted in QUOTED if re.fullmatch(r"[\w./]*(/|\.(py|md|toml))", quoted)}
DIAGRAMS = {module: diagram for module, diagram in FENCE.findall(PAGE) if module}
# The paths in the first column of the table of modules.
LISTED = [
    path
    for cell in re.findall(r"^\| ([^|]+) \|", PAGE, re.MULTILINE)
    if re.fullmatch(r"(\**`[\w/]+(\.py|/)`\**(, )?)+", cell)
    for path in re.findall(r"`([^`]+)`", cell)
]


class Names:
    """The names that the package defines, with the members and the base classes of its classes."""

    def __init__(self) -> None:
        self._members: dict[str, set[str]] = {}
        self._bases: dict[str, set[str]] = {}
        trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
        self._all = {name for tree in trees for name in _defined_in(tree)}
        for cls in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            self._members.setdefault(cls.name, set()).update(_defined_in(cls))
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in cls.bases]
            self._bases.setdefault(cls.name, set()).update(map(ast.unparse, bases))

    def __contains__(self, name: str) -> bool:
        owner, _, member = name.rpartition(".")
        return member in self._members_of(owner) if owner else name in self._all

    def _members_of(self, cls: str) -> set[str]:
        inherited = (self._members_of(base) for base in self._bases.get(cls, ()))
        return self._members.get(cls, set()).union(*inherited)


def _defined_in(node: ast.AST) -> set[str]:
    names = set()
    for inner in ast.walk(node):
        match inner:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_the_table_lists_every_module_and_package_once() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    packages = {path.parent for path in modules} - {PACKAGE}
    expected = [str(path.relative_to(PACKAGE)) for path in modules]
    expected += [f"{path.relative_to(PACKAGE)}/" for path in packages]

    assert sorted(LISTED) == sorted([*expected, "__init__.py"])


def test_the_table_has_the_order_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", layer) for layer in contracts[0]["layers"]]
    ranks = {name: rank for rank, layer in enumerate(layers) for name in layer}
    listed = [ranks[re.split(r"[/.]", path)[0]] for path in LISTED if path != "__init__.py"]

    assert listed == sorted(listed)


def test_the_files_that_the_page_names_exist() -> None:
    assert {name for name in FILES if not (PACKAGE / name).exists() and not (ROOT / name).exists()} == set()


def test_the_names_on_the_page_are_defined() -> None:
    defined = Names()
    identifiers = {quoted for quoted in QUOTED - FILES if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", quoted)}

    assert len(identifiers) > 100
    assert {name for name in identifiers if name not in defined and name != "aiotensor"} == set()


@pytest.mark.parametrize("module", DIAGRAMS)
def test_a_state_diagram_is_that_of_its_module(module: str) -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE / module).read_text())) or ""
    drawn = {line.strip() for line in docstring.splitlines()}

    assert {line.strip() for line in DIAGRAMS[module].splitlines()} - drawn == set()
