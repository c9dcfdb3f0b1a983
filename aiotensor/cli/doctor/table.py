"""The same on a terminal. The only room here that needs rich."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aiotensor.cli.doctor.finding import Finding, Status
from aiotensor.cli.doctor.report import verdict

__all__ = ["as_table"]

_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}


def as_table(findings: Sequence[Finding]) -> Group:
    """Draw one row for each finding, with what to do below what was found, and a line that sums up."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        # Text, since found and advice hold paths and messages of others, where brackets are no markup.
        said = Text(finding.found)
        if finding.advice:
            said.append(f"\n{finding.advice}", style="italic")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.check), said)
    statuses = [finding.status for finding in findings]
    worst = next((status for status in (Status.PROBLEM, Status.NOTE) if status in statuses), Status.OK)
    return Group(table, Text(), Text(verdict(findings), style=_STYLES[worst]))
