"""The reference covers every public name and every option of the command."""

import importlib
import re

import click
import pytest

from aiotensor.cli.command import aiotensor
from tests.docs.pages import ROOT

PUBLIC = [
    "aiotensor",
    "aiotensor.blocking",
    "aiotensor.broadcast",
    "aiotensor.channel",
    "aiotensor.codec",
    "aiotensor.inspection",
    "aiotensor.integrations.aiohttp",
    "aiotensor.integrations.fastapi",
    "aiotensor.integrations.opentelemetry",
    "aiotensor.integrations.prometheus",
    "aiotensor.integrations.pytest",
    "aiotensor.integrations.vllm",
    "aiotensor.queues",
    "aiotensor.ranks",
]
# Modules that the public ones are made of.
INTERNAL = {"leaks", "limits", "problems", "samples", "serving", "totals", "watching"}
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md"))}
DESCRIBED = re.findall(r"^::: ([\w.]+)$", "\n".join(PAGES.values()), re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_of_a_module_is_in_the_reference(name: str) -> None:
    module = importlib.import_module(name)
    described = {text.rpartition(".")[2] for text in DESCRIBED if text.rpartition(".")[0] == name}
    public = set(module.__all__)
    if "__version__" in public:
        assert "`aiotensor.__version__`" in PAGES["tensors.md"]
        public.remove("__version__")
    assert public - described == set()


def test_each_integration_is_public_or_internal() -> None:
    folder = ROOT / "aiotensor" / "integrations"
    modules = {path.stem for path in folder.iterdir() if not path.stem.startswith("_")}
    public = {name.rpartition(".")[2] for name in PUBLIC if name.startswith("aiotensor.integrations.")}
    assert modules == public | INTERNAL


def test_no_name_is_in_the_reference_twice() -> None:
    assert len(DESCRIBED) == len(set(DESCRIBED))
    assert len(DESCRIBED) > 80


def test_each_described_module_is_named_in_the_overview() -> None:
    modules = {text.rpartition(".")[0] for text in DESCRIBED} - {"aiotensor.types"}
    named = re.findall(r"^\| `([\w.*]+)` \|", PAGES["index.md"], re.MULTILINE)
    assert {re.sub(r"^(aiotensor\.integrations)\..*", r"\1.*", module) for module in modules} == set(named)


def test_each_subcommand_option_and_exit_status_is_in_the_reference() -> None:
    page = " ".join(PAGES["command-line.md"].split())
    for name, command in aiotensor.commands.items():
        assert f"## aiotensor {name}" in page
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(option in page for option in parameter.opts)
                assert " ".join((parameter.help or "").split()) in page
