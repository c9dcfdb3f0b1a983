"""The page on troubleshooting covers all errors and all events that need an action, and quotes real texts."""

import ast
import re

import pytest

import aiotensor
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LEVELS = ("WARNING", "ERROR", "CRITICAL")  # an event of INFO and DEBUG needs no action


def _events() -> set[str]:
    """Return the events of the page about logging at a level that needs an action."""
    rows = re.findall(
        r"^\| `(\w+)` \| `[\w.]+` \| ([\w ]+) \|", (ROOT / "docs" / "logging.md").read_text(), re.M
    )
    return {event for event, levels in rows if any(level in levels for level in LEVELS)}


def _texts() -> list[str]:
    """Return all literal texts of the package, and the literal parts of its formatted texts."""
    trees = (ast.parse(path.read_text()) for path in sorted((ROOT / "aiotensor").rglob("*.py")))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value for node in nodes if isinstance(node.value, str)]


def _quoted() -> list[str]:
    """Return the quoted texts of errors: code with spaces in the first columns of tables."""
    [errors] = re.findall(r"^## Errors$(.*?)^## ", PAGE, re.DOTALL | re.M)
    cells = re.findall(r"^\| (.*?) \|", errors, re.M)
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if " " in text]


@pytest.mark.parametrize("name", [name for name in aiotensor.__all__ if name.endswith("Error")])
def test_each_error_has_a_section(name: str) -> None:
    assert re.search(rf"^### {name}$", PAGE, re.M)


def test_each_event_that_needs_an_action_has_a_row() -> None:
    events = _events()
    assert len(events) > 40
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    assert events - set(listed) == set()


def test_the_quoted_texts_are_those_of_errors() -> None:
    texts = _texts()
    parts = [part.strip() for quoted in _quoted() for part in quoted.split("…") if part.strip()]
    assert len(parts) > 30
    assert [part for part in parts if not any(part in text for text in texts)] == []
