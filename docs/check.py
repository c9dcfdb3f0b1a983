"""Check the documents against the repository and the package; run by ``make lint``.

- Relative links in all Markdown files lead to files and headings that exist.
- The tables of docs/operation.md list exactly the log events and the metrics that the package declares.
"""

import ast
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from aiotensor import types
from aiotensor.statistics.counters import exported

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aiotensor"

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TYPES = ("counter", "gauge", "histogram")


def documents() -> list[Path]:
    """Return the Markdown files that git tracks, or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    paths = {ROOT / name for name in listed.split("\0") if name}
    return sorted(path for path in paths if path.is_file())


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page, as MkDocs and GitHub derive them."""
    found = set()
    for title in re.findall(r"^#+ +(.+?) *#*$", _FENCE.sub("", path.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        letters = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", letters).strip().lower()))
    return found


def broken_links(path: Path) -> Iterator[str]:
    """Yield the problems of the links in a page."""
    text = _CODE.sub("", _FENCE.sub("", path.read_text()))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            yield f"{path.relative_to(ROOT)}: there is no file {file}"
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            yield f"{path.relative_to(ROOT)}: there is no heading {link}"


@cache
def modules() -> list[ast.Module]:
    """Parse the package."""
    return [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in a tree with the last parts of their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def logged_events() -> set[str]:
    """Return the loggers and the events of all log calls: ``extra`` is a literal with the key ``event``.

    The roles that have a `PeerLog` share its events. A function that takes a logger logs for its callers.
    """
    found, roles, shared = set(), set(), set()
    functions: dict[str, set[str]] = {}
    for tree in modules():
        roles |= {ast.literal_eval(call.args[0]) for name, call in calls(tree) if name == "PeerLog"}
        for node in tree.body:
            events = {
                event for _, call in calls(node) for event in filter(None, map(event_of, call.keywords))
            }
            if logger := logger_in(tree):
                found |= {f"{logger} {event}" for event in events}
            elif isinstance(node, ast.FunctionDef):
                functions[node.name] = events
            else:
                shared |= events
    for tree in modules():
        if logger := logger_in(tree):
            for name, _ in calls(tree):
                found |= {f"{logger} {event}" for event in functions.get(name, ())}
    return found | {f"{role} {event}" for role, event in product(roles, shared)}


def logger_in(tree: ast.Module) -> str | None:
    """Return the logger of a module; None if it has none, or several."""
    given = [call.args[0] for name, call in calls(tree) if name == "logger_of"]
    name = given[0].value if given and isinstance(given[0], ast.Constant) else None
    return name if isinstance(name, str) else None


def event_of(keyword: ast.keyword) -> str | None:
    """Return the event that a keyword argument states, if it does."""
    value: ast.expr | None = keyword.value if keyword.arg == "event" else None
    if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
        for key, entry in zip(keyword.value.keys, keyword.value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "event":
                value = entry
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def declared_metrics() -> set[str]:
    """Return the objects, names and types of the metrics that the classes of statistics declare."""
    found = set()
    for name, kind in vars(types).items():
        if name.endswith("Statistics") and isinstance(kind, type):
            role = name.removesuffix("Statistics").lower()
            prefix = f"aiotensor_{role}_"
            found |= {f"{role} {one.metric.removeprefix(prefix)} {one.type}" for one in exported(kind)}
    return found


def listed(page: str, column: tuple[str, ...]) -> set[str]:
    """Return the names in the first two cells of all rows whose third cell begins with one of some words."""
    found = set()
    for row in re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \|", page, re.MULTILINE):
        if row[2].split()[0] in column:
            names, objects = re.findall(r"`(\w+)`", row[0]), row[1].split(", ")
            suffix = f" {row[2]}" if column is _TYPES else ""
            found |= {f"{one} {name}{suffix}" for one, name in product(objects, names)}
    return found


def main() -> int:
    """Print all problems, and return whether there is one."""
    problems = [problem for path in documents() for problem in broken_links(path)]
    operation = (ROOT / "docs" / "operation.md").read_text()
    for what, ours, theirs in (
        ("event", logged_events(), listed(operation, _LEVELS)),
        ("metric", declared_metrics(), listed(operation, _TYPES)),
    ):
        problems += [f"docs/operation.md: no row has the {what} {one}" for one in sorted(ours - theirs)]
        problems += [f"docs/operation.md: the package has no {what} {one}" for one in sorted(theirs - ours)]
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
