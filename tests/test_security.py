"""The table of limits in SECURITY.md agrees with the code."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import aiotensor
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.frames import MAX_DIMENSIONS, MAX_TENSORS
from aiotensor.queues import MessageQueue
from aiotensor.ranks import RankPipe

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)(?:\((\w+)\))?` \| ([^|]+) \|", re.MULTILINE)
UNITS = {"": 1, "ms": 0.001, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ROWS = {(name, argument): default.strip() for name, argument, default in ROW.findall(TEXT)}

MADE: dict[str, Callable[..., object]] = {
    made.__name__: made
    for made in (
        aiotensor.TensorSender,
        aiotensor.TensorReceiver,
        Publisher,
        Subscriber,
        MessageServer,
        MessageClient,
        RankPipe,
        MessageQueue,
    )
}
# Endpoints, folders, ranks, keys, types and policies; and heartbeats, whose default depends on the address.
NO_LIMITS = [
    "group",
    "peer",
    "rank",
    "world_size",
    "host",
    "encrypt",
    "type",
    "slow",
    "endpoint",
    "address",
    "message_type",
    "reply_type",
    "sender",
    "receiver",
    "secret_key",
    "server_key",
    "client_keys",
    "heartbeat_interval_s",
    "heartbeat_timeout_s",
    "peer_timeout_s",
    "redeliver",
    "folder",
]


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_the_defaults_in_the_table_match_the_code(name: str, argument: str) -> None:
    if ROWS[name, argument] == "none":
        assert _value(name, argument) is None
        return
    found = re.fullmatch(r"(\d+)(?: (\w+))?", ROWS[name, argument])
    assert found is not None
    assert _value(name, argument) == int(found[1]) * UNITS[found[2] or ""]


def _value(name: str, argument: str) -> object:
    if argument:
        return inspect.signature(MADE[name]).parameters[argument].default
    module, _, constant = name.rpartition(".")
    return getattr(importlib.import_module(f"aiotensor.{module}"), constant)


@pytest.mark.parametrize("name", MADE)
def test_every_limit_that_can_be_set_is_in_the_table(name: str) -> None:
    limits = [argument for argument in inspect.signature(MADE[name]).parameters if argument not in NO_LIMITS]
    assert limits == [argument for row, argument in ROWS if row == name]


def test_every_bound_of_the_frames_is_in_the_table() -> None:
    frames = importlib.import_module("aiotensor.protocol.frames")
    bounds = {f"protocol.frames.{name}" for name in frames.__all__ if re.match("MAX|LEAST", name)}
    assert bounds == {name for name, _ in ROWS if name.startswith("protocol.frames.")}


def test_numbers_in_the_running_text_are_those_of_the_code() -> None:
    assert f"at most {MAX_DIMENSIONS} dimensions" in TEXT
    assert f"arrive in order, at most {MAX_TENSORS}" in TEXT


def test_every_place_in_the_code_that_is_named_exists() -> None:
    places = re.findall(r"\| ((?:`[\w/]+\.py`(?:, `\w+`)*(?:, )?)+) \|", TEXT)
    assert len(places) > 12
    for place in places:
        files = re.findall(r"`([\w/]+\.py)`", place)
        source = "".join((ROOT / "aiotensor" / file).read_text() for file in files)
        for function in re.findall(r"`(\w+)`", place):
            assert f"def {function}(" in source, f"{place} has no {function}"


def test_only_the_broadcast_for_vllm_imports_pickle() -> None:
    importing = set()
    for path in (ROOT / "aiotensor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            if {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names):
                importing.add(path.relative_to(ROOT / "aiotensor").as_posix())
    assert importing == {"integrations/vllm/pickling.py"}
