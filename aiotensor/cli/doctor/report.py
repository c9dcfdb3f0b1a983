"""What the doctor says: lines for people, JSON for machines."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from aiotensor.cli.doctor.finding import Finding, Status

__all__ = ["as_json", "as_lines", "verdict"]


def as_json(findings: Sequence[Finding]) -> str:
    """Write a list of objects with the keys check, status, found and advice."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def as_lines(findings: Sequence[Finding]) -> str:
    """Write one line for each finding, and a last one that sums them up."""
    return "\n".join([*map(_line, findings), verdict(findings)])


def verdict(findings: Sequence[Finding]) -> str:
    """Sum up in one line."""
    statuses = [finding.status for finding in findings]
    counted = [(statuses.count(status), status) for status in (Status.PROBLEM, Status.NOTE)]
    words = [f"{count} {noun}" + ("" if count == 1 else "s") for count, noun in counted if count]
    opening = "something needed is missing" if Status.PROBLEM in statuses else "everything needed is here"
    return ", ".join([opening, *words])


def _line(finding: Finding) -> str:
    advice = f". {finding.advice}" if finding.advice else ""
    return f"{finding.status:<7}  {finding.check}: {finding.found}{advice}"
