"""What the plugin does without vLLM's own code; `tests/vllm` uses that code."""

import sys
from types import SimpleNamespace

import pytest

from aiotensor.integrations.vllm.checks import UnsupportedError, check


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("0.31.9", False), ("0.32.0", True), ("0.33.1+cpu", True), ("0.34.0", False), ("0.330.0", False)],
)
def test_two_minor_versions_of_vllm_are_supported(
    version: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    if is_supported:
        check({})
    else:
        with pytest.raises(UnsupportedError, match=f"version {version} is not supported, only 0.32, 0.33"):
            check({})
