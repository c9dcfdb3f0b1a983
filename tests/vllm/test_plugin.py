"""The plugin replaces the names of vLLM that it knows, and otherwise changes nothing."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest
import vllm
from vllm.v1.engine import core, core_client, tensor_ipc
from vllm.v1.executor import abstract, multiproc_executor

from aiotensor.integrations.vllm import plugin

MODULES: tuple[ModuleType, ...] = (core, core_client, tensor_ipc, abstract, multiproc_executor)


def objects() -> dict[tuple[str, ...], int]:
    """Return the identity of every name in the modules that the plugin knows, and in their classes."""
    found: dict[tuple[str, ...], Any] = {}
    for module in MODULES:
        for name, value in vars(module).items():
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(module.__name__, name, attribute): one for attribute, one in vars(value).items()}
    return {name: id(value) for name, value in found.items()}


@pytest.fixture(autouse=True)
def enabled(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable all parts."""
    monkeypatch.setenv("AIOTENSOR_VLLM", "tensors, broadcast")


def test_the_plugin_is_an_entry_point() -> None:
    [entry] = [one for one in entry_points(group="vllm.general_plugins") if one.name == "aiotensor"]
    assert entry.load() is plugin.register


class OtherDecoder:
    def __init__(self, kind: object) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "value", "texts"),
    [
        (vllm, "__version__", "0.99.1", ("version 0.99.1 is not supported",)),
        (core, "MsgpackDecoder", OtherDecoder, ("MsgpackDecoder", "('kind',)")),
        (core_client, "SyncMPClient", None, (f"SyncMPClient._send_input of version {vllm.__version__} is",)),
    ],
    ids=["version", "signature", "name"],
)
def test_nothing_changes_in_an_unknown_vllm(
    owner: ModuleType,
    name: str,
    value: object,
    texts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, value)
    before = objects()
    with caplog.at_level(logging.INFO, "vllm.aiotensor"):
        plugin.register()
    assert objects() == before
    assert [record.event for record in caplog.records] == ["vllm_unchanged"]  # type: ignore[attr-defined]
    for text in texts:
        assert text in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("AIOTENSOR_VLLM", "tensor", "AIOTENSOR_VLLM='tensor' is unknown"),
        ("AIOTENSOR_VLLM_ARENA_BYTES", "0", "AIOTENSOR_VLLM_ARENA_BYTES='0' is not a positive number"),
        (
            "AIOTENSOR_VLLM_ADDRESS",
            "tcp://a:1",
            "AIOTENSOR_VLLM_ADDRESS='tcp://a:1' is not the path of a socket",
        ),
        ("AIOTENSOR_VLLM_ARENA", "1", "AIOTENSOR_VLLM_ARENA is unknown"),
    ],
)
def test_nothing_changes_with_a_wrong_setting(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    before = objects()
    plugin.register()
    assert objects() == before
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert text in record.message


def test_only_the_documented_names_are_replaced_once(caplog: pytest.LogCaptureFixture) -> None:
    before = objects()
    with caplog.at_level(logging.INFO, "vllm.aiotensor"):
        plugin.register()
        after = objects()
        plugin.register()
    assert objects() == after
    assert {name for name in after if before.get(name) != after[name]} == {
        ("vllm.v1.engine.core_client", "MPClient", "__init__"),
        ("vllm.v1.engine.core_client", "AsyncMPClient", "_send_input"),
        ("vllm.v1.engine.core_client", "SyncMPClient", "_send_input"),
        ("vllm.v1.engine.core", "EngineCoreProc", "process_input_sockets"),
        ("vllm.v1.engine.core", "EngineCoreProc", "preprocess_add_request"),
        ("vllm.v1.executor.abstract", "Executor", "get_class"),
    }


def test_a_disabled_plugin_imports_nothing_of_vllm() -> None:
    code = (
        "import sys; from aiotensor.integrations.vllm import plugin; plugin.register(); "
        "sys.exit(any(name.partition('.')[0] == 'vllm' for name in sys.modules))"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
