"""Each guarantee of docs/promises.md has a test in `make test`, and the page names such tests."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"


def _marks(node: ast.AST, name: str) -> list[ast.expr]:
    """Return the uses of a marker in decorators, or in a value such as that of `pytestmark`."""
    places = getattr(node, "decorator_list", [node])
    return [
        call
        for place in places
        for call in ast.walk(place)
        if isinstance(call, ast.Attribute) and call.attr == name and ast.unparse(call.value) == "pytest.mark"
    ]


def _numbers(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return {
        number.value
        for place in node.decorator_list
        if isinstance(place, ast.Call) and ast.unparse(place.func) == "pytest.mark.promise"
        for number in place.args
        if isinstance(number, ast.Constant) and isinstance(number.value, int)
    }


def _marked() -> dict[int, set[str]]:
    """Return the tests of `make test` that are marked with the number of each guarantee."""
    marked = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.Assign) and _marks(node.value, "extended") for node in tree.body):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _marks(node, "extended"):
                for number in _numbers(node):
                    marked[number].add(f"{path.relative_to(ROOT)}::{node.name}")
    return marked


def _listed() -> dict[int, set[str]]:
    """Return the tests that the page names for each guarantee."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): set(re.findall(r"`(tests/[^`]+)`", row)) for number, row in rows}


def test_each_guarantee_has_a_test_and_the_page_names_tests_that_show_it() -> None:
    marked, listed = _marked(), _listed()
    assert list(listed) == list(range(1, len(listed) + 1))
    assert not [number for number in listed if not marked[number]], "guarantees without a test"
    assert not {number: names - marked[number] for number, names in listed.items() if names - marked[number]}
    assert all(listed.values()), "guarantees for which the page names no test"
