"""Code of users of Prometheus, which mypy checks and which never runs."""

from typing import assert_type

from prometheus_client import REGISTRY

from aiotensor.integrations.prometheus import AioTensorCollector, MultiprocessPublisher


def register() -> None:
    REGISTRY.register(AioTensorCollector())
    REGISTRY.register(AioTensorCollector(timeout_s=0.5, max_endpoints=20))

    AioTensorCollector(0.5)  # type: ignore[call-arg]
    AioTensorCollector(timeout_s=None)  # type: ignore[arg-type]
    AioTensorCollector(max_endpoints=None)  # type: ignore[arg-type]


async def publish() -> None:
    async with MultiprocessPublisher(interval_s=2.5, timeout_s=0.5, max_endpoints=20) as publisher:
        assert_type(publisher, MultiprocessPublisher)

    MultiprocessPublisher(2.5)  # type: ignore[call-arg]
