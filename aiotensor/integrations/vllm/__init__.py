"""Tensor transport for vLLM 0.32 and 0.33.

`TensorConsumer` and `TensorProvider` are hooks for vLLM's `MsgpackEncoder` and `MsgpackDecoder`. The plugin
in `aiotensor.integrations.vllm.plugin` installs them in the processes of vLLM; see docs/vllm.md.
"""

from aiotensor.integrations.vllm.consumer import TensorConsumer
from aiotensor.integrations.vllm.provider import TensorProvider

__all__ = ["TensorConsumer", "TensorProvider"]
