"""A check for tests of forked children that leave a block of their parent, with asyncio or blocking calls."""


def check_told_of_fork(report: str) -> None:
    """Check that an error names the fork as its cause."""
    assert report.startswith("UsageError: this "), report
    assert "was inherited by a forked process" in report
