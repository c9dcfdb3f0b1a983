"""The alerting rules and the configuration for Prometheus are valid, and alerts fire only in their states."""

import re
import subprocess

import msgspec

from tests.dashboards.tools import tool
from tests.examples.programs import ROOT

FOLDER = ROOT / "deploy" / "prometheus"


def promtool(*arguments: str) -> str:
    """Run promtool, and return its output."""
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, check=False, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_and_the_configuration_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yaml")


def test_each_alert_fires_in_its_state_and_is_quiet_otherwise() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yaml")
    rules = msgspec.yaml.decode((FOLDER / "alerts.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in alerts]
    tested = re.findall(r'alertname="(\w+)"', (FOLDER / "alerts.test.yaml").read_text())
    assert set(tested) == set(names)
    for rule in alerts:  # each alternative of an alert has its own case
        assert tested.count(rule["alert"]) >= rule["expr"].count("\nor ") + 1, rule["alert"]
