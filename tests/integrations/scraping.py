"""Scrapes in the format of Prometheus, and functions that search them."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest, parser
from prometheus_client.samples import Sample

from aiotensor.integrations.prometheus import AioTensorCollector

Numbers: TypeAlias = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def new_registry(**options: Any) -> CollectorRegistry:
    """Return a registry with a collector, as in an application."""
    registry = CollectorRegistry()
    registry.register(AioTensorCollector(**options))
    return registry


def parse(text: str) -> Numbers:
    """Parse a scrape in the format of Prometheus."""
    return _numbers(
        sample for family in parser.text_string_to_metric_families(text) for sample in family.samples
    )


def scrape(registry: CollectorRegistry) -> Numbers:
    """Scrape in the format of Prometheus, in this thread."""
    return parse(generate_latest(registry).decode())


def _numbers(samples: Iterable[Sample]) -> Numbers:
    found: Numbers = {}
    for sample in samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        assert key not in found, f"told twice: {key}"
        found[key] = sample.value
    return found


def at(numbers: Numbers, endpoint: str) -> dict[str, float]:
    """Return the numbers of one endpoint by their names, with their other labels as ``name{label=value}``."""
    found = {}
    for (name, labels), value in numbers.items():
        if ("endpoint", endpoint) in labels:
            others = ",".join(f"{label}={text}" for label, text in labels if label != "endpoint")
            found[f"{name}{{{others}}}" if others else name] = value
    return found
