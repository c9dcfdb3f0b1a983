"""A scheduler like ``--dist loadfile`` of pytest-xdist that tolerates the death of workers."""

from contextlib import suppress

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["FileScheduling"]


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Assign whole files to workers, and the remaining tests of a dead worker to others.

    pytest-xdist 3.8 repeats the test during which a worker died, so it kills one worker after the other. It
    also assigns finished files, and a single file to a new worker: a worker that has no test or one test
    waits for more and never requests it, so the run never ends.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that was running in a dead worker, and reschedule its other tests."""
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
        # A worker runs its last test only when it knows the next one, or knows that none follows.
        while not node.shutting_down and (
            not self.workqueue or self._pending_of(self.assigned_work[node]) <= 2
        ):
            super()._reschedule(node)
