"""The result of a check, and the output of all results: lines, JSON, or a table on a terminal."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from aiotensor.cli.words import counted

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Finding", "Status", "as_json", "as_lines", "as_table", "read", "verdict"]


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"  # a limitation; most functions work nevertheless
    PROBLEM = "problem"  # a requirement is not met


_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        status: the severity.
        found: the result, as a phrase without a full stop.
        advice: the remedy, as a sentence without a full stop; None if none is needed.
    """

    status: Status
    found: str
    advice: str | None = None


def read(file: Path) -> str:
    """Return the text of a file in /proc or /sys; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def as_json(findings: Mapping[str, Finding]) -> str:
    """Format findings as a JSON list of objects with the keys check, status, found and advice."""
    return json.dumps([{"check": check, **asdict(finding)} for check, finding in findings.items()], indent=2)


def as_lines(findings: Mapping[str, Finding]) -> str:
    """Format findings as one line each, with the verdict as the last line."""
    return "\n".join([*map(_line, findings, findings.values()), verdict(findings.values())])


def _line(check: str, finding: Finding) -> str:
    advice = f". {finding.advice}" if finding.advice else ""
    return f"{finding.status:<7}  {check}: {finding.found}{advice}"


def verdict(findings: Iterable[Finding]) -> str:
    """Summarize findings in one line."""
    statuses = [finding.status for finding in findings]
    numbers = [(statuses.count(status), status) for status in (Status.PROBLEM, Status.NOTE)]
    words = [counted(number, status) for number, status in numbers if number]
    opening = "some requirements are not met" if Status.PROBLEM in statuses else "all requirements are met"
    return ", ".join([opening, *words])


def as_table(findings: Mapping[str, Finding]) -> "Group":
    """Return a table with a row for each finding and its advice, and the verdict below it. Needs rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check, finding in findings.items():
        # The brackets in paths and error messages would be markup in a str, but not in a Text.
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n{finding.advice}", style="italic")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(check), found)
    statuses = [finding.status for finding in findings.values()]
    worst = next((status for status in (Status.PROBLEM, Status.NOTE) if status in statuses), Status.OK)
    return Group(table, Text(), Text(verdict(findings.values()), style=_STYLES[worst]))
