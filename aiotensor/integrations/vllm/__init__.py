"""Tensor transport for vLLM 0.32 and 0.33.

`TensorConsumer` and `TensorProvider` are hooks for vLLM's `MsgpackEncoder` and `MsgpackDecoder`. The plugin
in `aiotensor.integrations.vllm.plugin` uses them in the processes of vLLM; see docs/vllm.md.
"""

from aiotensor.integrations.vllm.hooks import TensorConsumer, TensorProvider

__all__ = ["TensorConsumer", "TensorProvider"]
