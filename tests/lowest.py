"""Print constraints with the lowest supported version of each dependency, for `make test-lowest`.

The lower bounds in pyproject.toml become exact versions. Tools that check or measure the code have no
influence on it, so their newest versions are used.
"""

import re
import sys
import tomllib
from pathlib import Path

_TOOLS = {"coverage", "hypothesis", "import-linter", "mypy", "ruff"}


def main() -> None:
    """Print one constraint for each requirement with a lower bound."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lowest: dict[str, str] = {}
    for requirement in [*project["dependencies"], *(one for name in extras for one in extras[name])]:
        bound = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?[>=]=([\w.]+)", requirement)
        if bound is not None and bound[1] not in _TOOLS:
            lowest[bound[1]] = max(lowest.get(bound[1], "0"), bound[2], key=_numbers)
    for name, version in sorted(lowest.items()):
        sys.stdout.write(f"{name}=={version}\n")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    main()
