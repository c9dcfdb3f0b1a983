"""A bare `torch.multiprocessing.Queue` that shares memory by names in the file system."""

from bench.contenders.base import Layout
from bench.contenders.torch_queue import QueueSide, connect_by


def connect(layout: Layout) -> tuple[list[QueueSide], QueueSide]:
    return connect_by("file_system", layout)
