"""Requests in progress when their engine stops, for each way in which an engine stops."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from aiotensor import PeerLostError, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations.problems import problem_of
from tests.integrations.totals import Total, numbers

ROOT = Path(__file__).parents[2]

OTHERS = (signal.SIGINT, signal.SIGKILL)

PROGRAM = """
import logging, signal, sys, threading
from contextlib import suppress
from aiotensor import blocking
from tests.integrations.totals import Numbers

logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
tensors, messages = sys.argv[1:]

def model(message):
    print("working", flush=True)
    threading.Event().wait(3600)  # a model waits for its GPU; a signal interrupts both

with suppress(KeyboardInterrupt):
    with blocking.TensorReceiver(tensors) as receiver:
        with blocking.MessageServer(messages, Numbers, receiver=receiver) as server:
            server.serve(model)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.extended) for one in OTHERS)]
)
async def test_requests_in_progress_are_lost_and_not_failed_when_the_engine_stops(
    number: signal.Signals, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiotensor")
    tensors, messages = f"unix://{folder}/t", f"ipc://{folder}/m"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, tensors, messages),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with (
        TensorSender(tensors, 4) as sender,
        MessageClient(messages, sender=sender, reply_type=Total) as client,
    ):
        asking = [asyncio.create_task(client.request(numbers(bytes(9)))) for _ in range(3)]
        assert process.stdout is not None
        assert await process.stdout.readline() == b"working\n"
        process.send_signal(number)
        _, errors = await process.communicate()
        for error in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(error, PeerLostError), error
            assert error.pid == process.pid
            problem = problem_of(error, 2)
            assert problem is not None
            assert (problem.status, problem.headers) == (503, {"Retry-After": "2"})
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0), errors
    assert b"ERROR aiotensor" not in errors  # asyncio reports that SystemExit ended a task
    assert "ERROR" not in {record.levelname for record in caplog.records}
