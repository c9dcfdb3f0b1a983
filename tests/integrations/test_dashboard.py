"""The dashboard and the alerts name only exported metrics."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.integrations.prometheus import AioTensorCollector
from tests.channel.parties import Answer, Question, place
from tests.ranks.pipes import ends
from verification.places import endpoint

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

ALERTS = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text()
EXPRESSIONS = re.findall(r"^ +expr: \|\n((?: {10}.*\n)+)", ALERTS, re.MULTILINE)

# The labels that Prometheus adds to every series.
ADDED = {"job", "instance"}


async def exported() -> dict[str, Metric]:
    """Return the families that one object of each kind exports, by their exported names."""
    with place() as here, endpoint("unix") as there, endpoint("unix") as elsewhere:
        async with (
            ends(),
            Publisher(there),
            Subscriber(there),
            TensorReceiver(elsewhere),
            TensorSender(elsewhere),
            MessageServer(here, Question),
            MessageClient(here, Answer),
        ):
            families = list(AioTensorCollector().collect())
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in families
        if family.samples
    }


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels}


def labels_in(families: dict[str, Metric]) -> list[dict[str, str]]:
    return [sample.labels for family in families.values() for sample in family.samples]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\baiotensor_\w+", query))


async def test_every_name_label_and_type_that_the_dashboard_and_the_alerts_ask_for_is_exported() -> None:
    families = await exported()
    labels = {
        sample.name: labels_of(family) | ADDED for family in families.values() for sample in family.samples
    }
    variables = [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    for query in variables:
        assert names_in(query) - {"aiotensor_"} <= labels.keys(), query
    for panel in PANELS:
        for target in panel["targets"]:
            [name] = names_in(target["expr"])
            selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", target["expr"])
            grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            by = {label.strip() for group in grouped for label in group.split(",")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert {*selected} | by <= labels[name], target["expr"]
            assert shown <= by, target["legendFormat"]  # others are gone after the sum

    types = {label["type"] for label in labels_in(families) if "type" in label}
    assert len(EXPRESSIONS) == ALERTS.count("- alert:")
    for expression in EXPRESSIONS:
        assert names_in(expression)
        assert names_in(expression) <= labels.keys(), expression
        assert {*re.findall(r'{type="(\w+)"}', expression)} <= types, expression


async def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    families = await exported()
    for query in QUERIES:
        [name] = names_in(query)
        family = families.get(name) or families[name.removesuffix("_bucket")]
        assert bool(re.search(r"\b(rate|increase)\(", query)) == (family.type != "gauge"), query
        assert ("histogram_quantile(" in query) == (family.type == "histogram"), query
