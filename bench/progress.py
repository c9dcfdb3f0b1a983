"""Progress of a run: a bar on a terminal, and elsewhere a line for each contender in each round."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """Print the steps of a run with a number of batches to a console."""

    def __init__(self, console: Console, batches: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=batches)
        self._began = time.monotonic()

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, what: str, done: int) -> None:
        """Handle a step that has just begun, or has ended a number of batches."""
        self._progress.update(self._task, advance=done, description=what)
        if what.startswith("FAILED") or not (done or self._console.is_terminal):
            self._console.print(f"{time.monotonic() - self._began:6.1f} s  {what}", markup=False)
