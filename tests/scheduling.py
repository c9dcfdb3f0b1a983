"""The scheduler of the tests: as ``--dist loadfile`` of pytest-xdist, but robust against workers that die."""

from contextlib import suppress

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["FileScheduling"]


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Give each worker whole files, and what a dead worker left to another one.

    pytest-xdist 3.8 runs the test again that a worker died in, which kills one worker after the other. It
    also hands out files that are finished, and gives a new worker a single file: with no test or only one to
    run, a worker waits for more and never asks for it, so that the run never ends.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that a worker died in, and reschedule those that it had not begun."""
        files = self.assigned_work.pop(node)
        left = {
            file: unfinished
            for file, tests in files.items()
            if (unfinished := {test: False for test, is_done in tests.items() if not is_done})
        }
        if not left:
            return None
        died_in: str = next(iter(next(iter(left.values()))))
        for file, tests in reversed(left.items()):
            tests.pop(died_in, None)
            if tests:
                self.workqueue[file] = tests
                self.workqueue.move_to_end(file, last=False)
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _assign_work_unit(self, node: WorkerController) -> None:
        with suppress(OSError):  # it has just died; `remove_node` is called next, and takes the file back
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it is new, and gets work when it has collected the tests
        # A worker runs its last test only when it knows the next one, or that there is none.
        while not node.shutting_down and (
            not self.workqueue or self._pending_of(self.assigned_work[node]) <= 2
        ):
            super()._reschedule(node)
