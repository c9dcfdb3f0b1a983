"""The workflows of the repository run the commands that a developer runs."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_workflow_calls_existing_targets_of_make(workflow: Path) -> None:
    called = re.findall(r"\bmake((?: [a-z][\w-]*(?= |$))+)", workflow.read_text(), re.MULTILINE)

    assert called
    assert {name for names in called for name in names.split()} <= {
        name for target in TARGETS for name in target.split()
    }


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_action_is_pinned_to_a_commit_with_its_version_in_a_comment(workflow: Path) -> None:
    used = re.findall(r"uses: (.*)", workflow.read_text())

    assert used
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_hooks_before_a_commit_use_the_tools_of_make_lint() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    tools = {re.split(r"[>=]", requirement)[0] for requirement in groups["lint"]}

    assert {"ruff", "import-linter"} <= tools
    for command in ("ruff format", "ruff check", "lint-imports"):
        assert f"entry: .venv/bin/{command}" in hooks
