"""vLLM's processes without a GPU: API servers with their clients, and an engine core with a stand-in model.

Each server process runs ``target(client, argument, index)``. The engine process runs all of vLLM's engine
core: its answer to a request is the `checksum` of the tensors that it received.
"""

import argparse
import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.utils import CoreEngineLaunch, bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor import Executor
from vllm.v1.utils import APIServerProcessManager

from tests.vllm.stand_in import WORKER, InProcess, write_model

ENGINE = "the engine"
PLACEHOLDERS = 8  # tokens of one video in the prompt
_ENDING_S = 5.0  # vLLM kills processes that take longer to end


def engine_config(folder: Path, *, executor: type | str = InProcess, **options: Any) -> VllmConfig:
    """Return a real configuration of a stand-in model, whose files are written to the folder."""
    arguments = EngineArgs(
        model=write_model(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,  # nothing has a KV cache
        distributed_executor_backend=executor,
        worker_cls=WORKER,
        **options,
    )
    return arguments.create_engine_config()


def request(name: str, videos: Sequence[dict[str, Any]] = (), *, tokens: int = 1) -> EngineCoreRequest:
    """Return a request with videos, each a dict of nested tensors, that produces `tokens` tokens."""
    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem(
                {key: MultiModalFieldElem(data, MultiModalBatchedField()) for key, data in video.items()}
            ),
            modality="video",
            identifier=f"{name}-{index}",
            mm_position=PlaceholderRange(offset=index * PLACEHOLDERS, length=PLACEHOLDERS),
        )
        for index, video in enumerate(videos)
    ]
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1] * max(1, len(features) * PLACEHOLDERS),
        mm_features=features or None,
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


Target = Callable[[AsyncMPClient, Any, int], Awaitable[Any]]


class Running:
    """The processes of a server that is up."""

    def __init__(
        self, launch: CoreEngineLaunch, servers: APIServerProcessManager, results: Sequence[Any]
    ) -> None:
        self.engine = launch.engine_manager.processes[0]
        self.servers = servers.processes
        self._results = results

    def result(self, index: int) -> Any:
        """Return the result of the target in one server, or raise its error."""
        connection, process = self._results[index], self.servers[index]
        wait([connection, process.sentinel])
        if not connection.poll():
            process.join()
            raise RuntimeError(f"{process.name} ended with status {process.exitcode}")
        error, value = connection.recv()
        if error is not None:
            raise RuntimeError(f"{process.name}: {error}")
        return value

    def results(self) -> list[Any]:
        """Return the results of all servers."""
        return [self.result(index) for index in range(len(self.servers))]


def run_server(_address: str, _socket: object, args: argparse.Namespace, addresses: dict[str, Any]) -> None:
    """Run the target in an API server process, with the client that vLLM's servers have."""
    index = addresses.pop("client_index")
    count = addresses.pop("client_count")
    results = args.results[index]
    load_general_plugins()  # as vLLM's servers do before they parse their arguments

    async def main() -> Any:
        client = AsyncMPClient(args.config, args.executor, False, addresses, count, index)
        try:
            return await args.target(client, args.argument, index)
        finally:
            client.shutdown()

    try:
        value = asyncio.run(main())
    except Exception:  # noqa: BLE001 # for the parent
        results.send((traceback.format_exc(), None))
    else:
        results.send((None, value))


@contextmanager
def serving(config: VllmConfig, *, servers: int, target: Target, argument: Any = None) -> Iterator[Running]:
    """Start an engine and API servers as `vllm serve --api-server-count` does, and stop them in the end.

    The argument `ENGINE` stands for the id of the engine process.
    """
    executor = Executor.get_class(config)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(servers)]
    args = argparse.Namespace(
        config=config,
        executor=executor,
        target=target,
        argument=argument,
        results=[writer for _, writer in pipes],
    )
    listeners = bind_engine_zmq_listeners(config, servers)
    launch = manager = None
    try:
        with launch_core_engines(config, executor, False, listeners.addresses) as launch:
            if argument == ENGINE:
                args.argument = launch.engine_manager.processes[0].pid
            manager = APIServerProcessManager(
                listen_address="",
                sock=None,
                args=args,
                num_servers=servers,
                input_listeners=listeners.inputs,
                output_listeners=listeners.outputs,
                target_server_fn=run_server,
                tensor_queue=launch.tensor_queue,
            )
            launch.watched_frontend_processes = manager.processes
        yield Running(launch, manager, [reader for reader, _ in pipes])
    finally:
        if manager is not None:
            manager.shutdown(timeout=_ENDING_S)
        if launch is not None:
            launch.engine_manager.shutdown(timeout=_ENDING_S)
            if launch.tensor_queue is not None:
                with suppress(OSError):
                    launch.tensor_queue.close()
        for reader, writer in pipes:
            reader.close()
            writer.close()


async def generate(client: AsyncMPClient, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    """Send requests and return the tokens of each, once all have finished; drops those of other requests."""
    tokens: dict[str, list[int]] = {sent.request_id: [] for sent in requests}
    for sent in requests:
        await client.add_request_async(sent)
    waiting = set(tokens)
    while waiting:
        outputs = await client.get_output_async()
        for output in outputs.outputs:
            if output.request_id not in tokens:
                continue  # of an aborted request
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                waiting.discard(output.request_id)
    return tokens
