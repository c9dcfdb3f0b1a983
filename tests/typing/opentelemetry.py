"""The public interface of the integration of OpenTelemetry, as a type checker sees it."""

from collections.abc import Mapping
from typing import assert_type

from opentelemetry import trace

from aiotensor import Delivery, blocking
from aiotensor.broadcast import Publication
from aiotensor.channel import Request
from aiotensor.integrations.opentelemetry import instrument, processing, uninstrument


def set_up(tracers: trace.TracerProvider) -> None:
    instrument()
    instrument(tracers)
    uninstrument()


def process(
    delivery: Delivery,
    publication: Publication[int],
    request: Request[int],
    another: blocking.Request[int],
) -> None:
    assert_type(delivery.trace_context, Mapping[str, str] | None)
    assert_type(publication.trace_context, Mapping[str, str] | None)
    assert_type(request.trace_context, Mapping[str, str] | None)
    with processing(delivery, publication, request, another) as span:
        assert_type(span, trace.Span)
    delivery.trace_context = None  # type: ignore[misc]
