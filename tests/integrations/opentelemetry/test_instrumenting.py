"""Instrumenting a process, and reverting it, at any time."""

import asyncio
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from aiotensor import UsageError
from aiotensor.integrations.opentelemetry import instrument, processing, uninstrument
from tests.channel.parties import Answer, Question, answer, channel
from tests.integrations.opentelemetry.spans import recording, serving
from verification.patterns import pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_a_process_that_is_not_instrumented_any_more_creates_no_spans() -> None:
    with recording() as recorder, pytest.raises(UsageError, match="call uninstrument"):
        instrument()
    uninstrument()
    async with channel() as ends, serving(ends.server, answer):
        await ends.client.request(Question(1, pattern(1, 3)))
        with processing() as span:
            assert not span.is_recording()
    assert recorder.seen == []


def test_the_global_providers_may_be_set_later() -> None:
    code = """
import asyncio, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from aiotensor import TensorReceiver, TensorSender
from aiotensor.integrations.opentelemetry import instrument

instrument()
exporter = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))

async def main(address):
    import torch
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await receiver.receive(await sender.send(torch.zeros(3)))

asyncio.run(main(sys.argv[1]))
names = {span.name for span in exporter.get_finished_spans()}
print(*sorted(names - {"aiotensor wait for a receiver"}), sep=",")
"""
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        command = [sys.executable, "-W", "error", "-c", code, f"unix://{folder}/tensors"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("aiotensor deliver tensor,aiotensor send tensor\n", "")


async def test_a_request_that_began_before_uninstrumenting_ends_its_spans() -> None:
    async with channel() as ends:
        with recording() as recorder:
            await ends.client.ready()
            asking = asyncio.create_task(ends.client.request(Question(1)))
            request = await anext(ends.server)
            await request.__aenter__()
            uninstrument()
            await request.reply(Answer(1))
            await request.__aexit__(None, None, None)
            await asking
    assert {span.name for span in recorder.seen} >= {"aiotensor request", "aiotensor answer"}


class _BrokenTracers(TracerProvider):
    """A provider without tracers."""

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        raise OSError("there are no tracers")


def test_a_process_is_not_instrumented_after_an_error_of_a_provider() -> None:
    with pytest.raises(OSError, match="no tracers"):
        instrument(_BrokenTracers())
    with recording():  # it would raise `UsageError`
        pass
