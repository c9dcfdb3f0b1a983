"""Requests in progress when their engine stops, for each way in which an engine stops."""

import asyncio
import signal
from pathlib import Path

import pytest

from aiotensor import PeerLostError, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations.problems import problem_of
from tests.integrations.stoppable import engine
from tests.integrations.totals import Total, numbers

# No program notices SIGKILL, in whatever style it is written.
ENDS = [
    ("blocking", signal.SIGTERM),
    *(
        pytest.param(style, number, marks=pytest.mark.extended)
        for style, number in [
            ("blocking", signal.SIGINT),
            ("asyncio", signal.SIGTERM),
            ("asyncio", signal.SIGINT),
            ("asyncio", signal.SIGKILL),
        ]
    ),
]


@pytest.mark.parametrize(("style", "number"), ENDS, ids=lambda one: getattr(one, "name", one))
async def test_requests_in_progress_are_lost_and_not_failed_when_the_engine_stops(
    style: str, number: signal.Signals, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiotensor")
    async with (
        engine(style, folder, pace_s=3600) as one,
        TensorSender(f"unix://{folder}/t", 4) as sender,
        MessageClient(f"ipc://{folder}/m", sender=sender, reply_type=Total) as client,
    ):
        asking = [asyncio.create_task(client.request(numbers(bytes(9)))) for _ in range(3)]
        await one.reports("working")
        status, errors = await one.stop(number)
        lost = await asyncio.gather(*asking, return_exceptions=True)
        for error in lost:
            assert isinstance(error, PeerLostError), error
            assert error.pid == one.process.pid
            problem = problem_of(error, 2)
            assert problem is not None
            assert (problem.status, problem.headers) == (503, {"Retry-After": "2"})
    assert status == (-signal.SIGKILL if number is signal.SIGKILL else 0), errors
    assert "ERROR aiotensor" not in errors  # asyncio reports that SystemExit ended a task
    assert "ERROR" not in {record.levelname for record in caplog.records}
