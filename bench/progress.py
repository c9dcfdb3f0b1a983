"""Progress of a run: a bar on a terminal, and elsewhere a line for each round of each workload."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.harness import Step
from bench.measure import format_size
from bench.plan import Plan

__all__ = ["Reporter"]


class Reporter:
    """Print the steps of a run to a console."""

    def __init__(self, console: Console, plan: Plan) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=plan.batches)
        self._plan = plan
        self._began = time.monotonic()
        self._round: tuple[str, int] | None = None

    def __enter__(self) -> "Reporter":
        for skip in self._plan.skips:
            if skip.workload is None:
                self._console.print(
                    f"SKIPPED {skip.contender}: {skip.reason}", style="bold yellow", markup=False
                )
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, step: Step) -> None:
        """Handle a step that has just begun or ended."""
        who = step.contender if step.loop is None else f"{step.contender} ({step.loop})"
        where = f"{step.workload}, round {step.round + 1} of {step.rounds}"
        if step.lost:
            self._console.print(f"FAILED {who} in {where}", style="red", markup=False)
            self._progress.update(self._task, advance=step.lost)
            return
        if not self._console.is_terminal and self._round != (step.workload, step.round):
            self._round = (step.workload, step.round)
            self._console.print(f"{time.monotonic() - self._began:6.1f} s  {where}", markup=False)
        done = "" if step.batch is None else f" has done {format_size(step.batch.size_bytes)}"
        advance = 0 if step.batch is None else 1
        self._progress.update(self._task, advance=advance, description=f"{where}: {who}{done}")
