"""The result of a check, and its output: a line, an object in JSON, or a row on a terminal."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from aiotensor.cli.words import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["Finding", "Status", "as_json", "as_line", "as_row", "colored_verdict", "read", "verdict"]


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"  # a limitation; most functions work nevertheless
    PROBLEM = "problem"  # a requirement is not met


_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}

# The widths of the columns, because the rows are printed one by one.
_STATUS_WIDTH = max(map(len, Status))
_CHECK_WIDTH = len("process limits")


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


def as_line(check: str, finding: Finding) -> str:
    """Format a finding as one line."""
    advice = f". {finding.advice}" if finding.advice else ""
    return f"{finding.status:<{_STATUS_WIDTH}}  {check}: {finding.found}{advice}"


def verdict(findings: Iterable[Finding]) -> str:
    """Summarize findings in one line."""
    statuses = [finding.status for finding in findings]
    numbers = [(statuses.count(status), status) for status in (Status.PROBLEM, Status.NOTE)]
    words = [counted(number, status) for number, status in numbers if number]
    opening = "some requirements are not met" if Status.PROBLEM in statuses else "all requirements are met"
    return ", ".join([opening, *words])


def as_row(check: str, finding: Finding) -> "Table":
    """Return a row with a finding and its advice. Needs rich."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True, min_width=_STATUS_WIDTH)
    row.add_column(no_wrap=True, min_width=_CHECK_WIDTH)
    row.add_column(overflow="fold")
    # The brackets in paths and error messages would be markup in a str, but not in a Text.
    found = Text(finding.found)
    if finding.advice:
        found.append(f"\n{finding.advice}", style="italic")
    row.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(check), found)
    return row


def colored_verdict(findings: Iterable[Finding]) -> "Text":
    """Return the verdict in the color of the most severe finding. Needs rich."""
    from rich.text import Text

    findings = list(findings)
    statuses = [finding.status for finding in findings]
    worst = next((status for status in (Status.PROBLEM, Status.NOTE) if status in statuses), Status.OK)
    return Text(verdict(findings), style=_STYLES[worst])
