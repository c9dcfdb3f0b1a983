"""The table of contenders. Their modules are imported only in the processes that measure them."""

from bench.contenders.base import Contender

__all__ = ["BASELINE", "CONTENDERS"]

BASELINE = "torch-queue"

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            "aiotensor-queue", "bench.contenders.aiotensor_queue", "TensorQueue, sent from ordinary memory"
        ),
        Contender(
            "torch-queue", "bench.contenders.torch_queue", "bare torch.multiprocessing.Queue, blocking calls"
        ),
        Contender(
            "raw-socket", "bench.contenders.raw_socket", "bytes over a Unix socket: the floor at small sizes"
        ),
    )
}
