"""A model, its processor and its worker without weights: everything else in the engine process is vLLM's.

The worker "samples" the sum of the bytes of a request's tensors, so that the client sees what arrived.
"""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

WORKER = f"{__name__}.Worker"

_ARCHITECTURE = "StandInForConditionalGeneration"
_CONFIG = {
    "architectures": [_ARCHITECTURE],
    "model_type": "llama",
    "vocab_size": 1 << 31,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}


def write_model(folder: Path) -> str:
    """Write what vLLM reads of a model, and return its path."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return str(folder)


def _not_used(*args: Any, **options: Any) -> NoReturn:
    """Take the place of a method that vLLM's base classes or its inspection of models require."""
    raise AssertionError("vLLM uses the model or its processor, and not the worker of the tests")


class _Info(BaseProcessingInfo):  # type: ignore[misc] # vLLM is not typed for us
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"video": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"video": 8}


class _NoDummies(BaseDummyInputsBuilder[_Info]):  # type: ignore[misc]
    get_dummy_text = get_dummy_mm_data = _not_used


class _Processor(BaseMultiModalProcessor[_Info]):  # type: ignore[misc]
    requires_tokenizer = False  # and nothing is processed: requests bring their tensors

    _get_mm_fields_config = _get_prompt_updates = _not_used


@MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_NoDummies)
class _Model(torch.nn.Module):
    """A model class, with the members that vLLM inspects."""

    supports_multimodal = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        _not_used()

    embed_input_ids = compute_logits = _not_used


ModelRegistry.register_model(_ARCHITECTURE, _Model)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list) else []


def checksum(tensors: list[torch.Tensor]) -> int:
    """Return a number that differs between most tensors, and depends on their order."""
    total = 0
    for tensor in tensors:
        total = (31 * total + int(tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64))) % (1 << 31)
    return total


class Worker(WorkerBase):  # type: ignore[misc]
    """Take part in everything but the computation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums: dict[str, int] = {}
        self._requests: dict[str, object] = {}  # with their tensors, as in vLLM's workers

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def initialize_from_config(self, kv_cache_config: Any) -> None: ...

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def echo(self, value: object) -> object:
        return value

    def pause(self) -> None:
        """Do not return; vLLM ends its workers by a signal."""
        signal.pause()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        for request in scheduler_output.scheduled_new_reqs:
            items = [feature.data for feature in request.mm_features if feature.data is not None]
            tensors = [tensor for item in items for elem in item.values() for tensor in tensors_in(elem.data)]
            self._sums[request.req_id] = checksum(tensors)
            self._requests[request.req_id] = request
        for finished in scheduler_output.finished_req_ids:
            self._sums.pop(finished, None)
            self._requests.pop(finished, None)
        ids = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[self._sums[name]] for name in ids],
        )


class InProcess(UniProcExecutor):  # type: ignore[misc]
    """Run the worker in the engine process; the class brings this module there."""
