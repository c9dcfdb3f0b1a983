"""Start one contender in separate processes, read their reports, and end them in any case."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import msgspec

from bench.contenders.base import Contender
from bench.fork_server import Output, own_server
from bench.measure import format_size
from bench.records import Batch, Spec
from bench.worker import near
from bench.workloads import WORKLOADS
from verification.networks import two_hosts

_OUTPUT_TAIL = 3000


class FailedError(Exception):
    """A contender did not finish, for the given reason; contains the end of its output."""

    output = ""


def run(contender: Contender, spec: Spec, deadline_s: float, on_batch: Callable[[Batch], None]) -> None:
    """Measure one contender in fresh processes; call `on_batch` with each batch.

    Args:
        contender: the contender.
        spec: the task.
        deadline_s: seconds for each batch; for the first, starting included.
        on_batch: called with each batch.

    Raises:
        FailedError: the contender crashed, or did not finish a batch in time and was killed.
    """
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryDirectory(prefix="aiotensor-bench-", ignore_cleanup_errors=True) as folder,
        two_hosts() if WORKLOADS[spec.workload].between_hosts else nullcontext() as hosts,
    ):
        results, theirs = get_context("forkserver").Pipe(duplex=False)
        arguments = (Output(output.fileno()), own_server(), contender, spec, Path(folder), theirs, hosts)
        process = get_context("forkserver").Process(target=near, args=arguments)
        with results:
            process.start()
            theirs.close()
            try:
                _read(results, process, spec, deadline_s, on_batch)
            except FailedError as error:
                error.output = _tail(output)
                raise
            finally:
                _kill(process)
                process.join()


def _read(
    results: Connection,
    process: BaseProcess,
    spec: Spec,
    deadline_s: float,
    on_batch: Callable[[Batch], None],
) -> None:
    size = spec.sizes[0]
    for size, _ in spec.batches:
        line = _next(results, process, size, deadline_s)
        on_batch(msgspec.json.decode(line, type=Batch))
    if not wait([process.sentinel], deadline_s):
        raise _late(size, deadline_s)
    process.join()
    if process.exitcode:
        raise FailedError(f"finished every size and then ended with exit status {process.exitcode}")


def _next(results: Connection, process: BaseProcess, size: int, deadline_s: float) -> bytes:
    end = time.monotonic() + deadline_s
    if not results.poll(deadline_s):
        raise _late(size, deadline_s)
    try:
        return results.recv_bytes()
    except EOFError:
        # It has closed its end, by ending; how it ended is known a moment later.
        process.join(max(0.0, end - time.monotonic()))
        reason = f"ended with exit status {process.exitcode} before it finished {format_size(size)}"
        raise FailedError(reason) from None


def _late(size: int, deadline_s: float) -> FailedError:
    return FailedError(
        f"did not finish {format_size(size)} and go on within {deadline_s:g} s, and was killed"
    )


def _kill(process: BaseProcess) -> None:
    if process.pid is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # it was killed before it could make its group
        process.kill()


def _tail(output: IO[bytes]) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - _OUTPUT_TAIL))
    return output.read().decode(errors="replace").strip()
