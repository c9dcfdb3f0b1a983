"""The table of contenders. Their modules are imported only in the processes that measure them."""

from collections.abc import Mapping
from importlib.util import find_spec

from bench.contenders.base import Contender

__all__ = ["BASELINE", "CONTENDERS", "missing", "why_not"]

BASELINE = "torch-queue"

_BLOCKS = "its calls block the event loop for as long as they take"
_NO_MEMORY = "it has no memory for its callers"
_COPIED = "the bytes of every tensor are moved, from wherever they are"
_OURS = "measured for aiotensor alone, as a promise that it makes"
_BLOCKING = {"allocated": _NO_MEMORY, "loop-lag": _BLOCKS, "resident": _OURS}
_LIMIT = dict.fromkeys(
    ("allocated", "pipelined", "fan-in", "loop-lag", "idle", "cost", "resident"),
    "it is a limit, and does round trips only",
)
_RANKS = dict.fromkeys(
    ("allocated", "pipelined", "fan-in", "loop-lag", "idle", "cost", "resident"),
    "it connects two ranks, and is compared with gloo by round trips only",
)
_ECHO = {"request-answer": "it is a limit, and returns as many bytes as it received"}

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            "aiotensor-unix",
            "bench.contenders.aiotensor_unix",
            "aiotensor over `unix://`",
            uses_loop=True,
        ),
        Contender(
            "aiotensor-queue",
            "bench.contenders.aiotensor_queue",
            "aiotensor over a `TensorQueue`",
            in_quick=False,
            uses_loop=True,
        ),
        Contender(
            "aiotensor-stock",
            "bench.contenders.aiotensor_stock",
            "aiotensor over a `torch.multiprocessing.Queue`",
            uses_loop=True,
            in_quick=False,
        ),
        Contender(
            "aiotensor-message-queue",
            "bench.contenders.aiotensor_message_queue",
            "aiotensor over a `MessageQueue`",
            uses_loop=True,
            in_quick=False,
            lacks={"allocated": _NO_MEMORY, "resident": _OURS},
        ),
        Contender(
            "aiotensor-tcp",
            "bench.contenders.aiotensor_tcp",
            "aiotensor over `tcp://` on the loopback",
            uses_loop=True,
            lacks={"allocated": _COPIED, "resident": _OURS},
        ),
        Contender(
            "aiotensor-curve",
            "bench.contenders.aiotensor_curve",
            "the same with keys: CURVE encrypts all bytes",
            in_quick=False,
            uses_loop=True,
            lacks={"allocated": _COPIED, "resident": _OURS},
        ),
        Contender(
            "aiotensor-ranks",
            "bench.contenders.aiotensor_ranks",
            "aiotensor's `RankPipe`: shared memory on one host, TCP between two",
            uses_loop=True,
            lacks=_RANKS,
            spans_hosts=True,
        ),
        Contender(
            "aiotensor-ranks-curve",
            "bench.contenders.aiotensor_ranks_curve",
            "the same with `encrypt=True`: CURVE encrypts all bytes",
            uses_loop=True,
            lacks=_RANKS | {"round-trip": "on one host nothing is encrypted"},
            spans_hosts=True,
        ),
        Contender(
            "torch-queue",
            "bench.contenders.torch_queue",
            "bare `torch.multiprocessing.Queue`, sharing by file descriptor, as is the default",
            lacks=_BLOCKING,
        ),
        Contender(
            "torch-queue-fs",
            "bench.contenders.torch_queue_fs",
            "bare `torch.multiprocessing.Queue`, sharing by the file system",
            in_quick=False,
            lacks=_BLOCKING,
        ),
        Contender(
            "zmq-ipc",
            "bench.contenders.zmq_ipc",
            "ZeroMQ, push to pull over `ipc://` with `copy=False`",
            lacks=_BLOCKING,
        ),
        Contender(
            "zmq-tcp",
            "bench.contenders.zmq_tcp",
            "the same over TCP",
            in_quick=False,
            lacks=_BLOCKING,
            spans_hosts=True,
        ),
        Contender(
            "faster-fifo",
            "bench.contenders.faster_fifo_queue",
            "faster-fifo, pickled arrays in its ring buffer",
            in_quick=False,
            needs={"faster_fifo": "faster-fifo"},
            lacks=_BLOCKING,
        ),
        Contender(
            "gloo",
            "bench.contenders.gloo",
            "torch.distributed isend and irecv on gloo: a header with the size, and the bytes",
            lacks=_BLOCKING,
            spans_hosts=True,
        ),
        Contender(
            "iceoryx2",
            "bench.contenders.iceoryx",
            "iceoryx2 publish and subscribe, woken by its events",
            in_quick=False,
            needs={"iceoryx2": "iceoryx2"},
            lacks={name: reason for name, reason in _BLOCKING.items() if name != "allocated"},
        ),
        Contender(
            "ray",
            "bench.contenders.ray_store",
            "Ray's object store, references through `ray.util.queue.Queue`",
            in_quick=False,
            needs={"ray": "ray"},
            lacks=_BLOCKING | {"fan-in": "16 Ray drivers take longer to start than all the rest to run"},
        ),
        Contender(
            "raw-socket",
            "bench.contenders.raw_socket",
            "limit: bytes over a Unix stream socket, blocking",
            is_limit=True,
            lacks=_LIMIT,
        ),
        Contender(
            "tcp-socket",
            "bench.contenders.tcp_socket",
            "limit: bytes over a TCP socket, blocking, into warm memory",
            is_limit=True,
            lacks=_LIMIT,
            spans_hosts=True,
        ),
        Contender(
            "raw-socket-loop",
            "bench.contenders.raw_socket_loop",
            "limit: bytes over a Unix record socket, in callbacks of the event loop",
            in_quick=False,
            uses_loop=True,
            is_limit=True,
            drives_itself=True,
            largest=64 << 10,
            lacks=_LIMIT,
        ),
        Contender(
            "memcpy-1",
            "bench.contenders.memcpy_one",
            "limit: two copies into warm memory, in one thread",
            is_limit=True,
            alone=True,
            lacks=_LIMIT,
        ),
        Contender(
            "memcpy-2",
            "bench.contenders.memcpy_two",
            "limit: two copies into warm memory, each by two threads",
            in_quick=False,
            is_limit=True,
            alone=True,
            lacks=_LIMIT,
        ),
        Contender(
            "aiotensor-channel",
            "bench.contenders.aiotensor_channel",
            "aiotensor's messages over `ipc://`, their tensors over `unix://`",
            uses_loop=True,
            carries="messages",
        ),
        Contender(
            "zmq-request",
            "bench.contenders.zmq_request",
            "plain pyzmq over `ipc://`, blocking: a header, and the tensor beside it with `copy=False`",
            carries="messages",
        ),
        Contender(
            "zmq-pickle",
            "bench.contenders.zmq_pickle",
            "pickle 5 over the same sockets, tensors out of band with `copy=False`",
            carries="messages",
        ),
        Contender(
            "zmq-echo",
            "bench.contenders.zmq_echo",
            "limit: bytes over a bare ZeroMQ socket and back, blocking",
            is_limit=True,
            lacks=_ECHO,
            carries="messages",
        ),
        Contender(
            "zmq-echo-loop",
            "bench.contenders.zmq_echo_loop",
            "limit: bytes over a bare ZeroMQ socket and back, in callbacks of the event loop",
            in_quick=False,
            uses_loop=True,
            is_limit=True,
            drives_itself=True,
            lacks=_ECHO,
            carries="messages",
        ),
        Contender(
            "zmq-echo-asyncio",
            "bench.contenders.zmq_echo_asyncio",
            "limit: bytes from a DEALER to a ROUTER and back, by pyzmq's sockets for asyncio",
            in_quick=False,
            uses_loop=True,
            is_limit=True,
            lacks=_ECHO,
            carries="messages",
        ),
        Contender(
            "aiotensor-publisher",
            "bench.contenders.aiotensor_publisher",
            "aiotensor's publisher and subscribers over `unix://`",
            uses_loop=True,
            carries="publications",
        ),
        Contender(
            "aiotensor-chain",
            "bench.contenders.aiotensor_chain",
            "aiotensor over `unix://`, from process to process",
            uses_loop=True,
            carries="chains",
        ),
        Contender(
            "aiotensor-senders",
            "bench.contenders.aiotensor_senders",
            "aiotensor's one-to-one transport over `unix://`, a sender for each reader",
            in_quick=False,
            uses_loop=True,
            lacks={
                "broadcast-allocated": "the memory of one sender is not that of the others",
                "broadcast-lag": "the workload of one sender measures it",
            },
            carries="publications",
        ),
        Contender(
            "zmq-xpub",
            "bench.contenders.zmq_xpub",
            "ZeroMQ XPUB and SUB over `ipc://`, pickle 5, out of band with `copy=False`",
            lacks={"broadcast-allocated": _NO_MEMORY, "broadcast-lag": _BLOCKS},
            carries="publications",
        ),
        Contender(
            "iceoryx2-readers",
            "bench.contenders.iceoryx_readers",
            "iceoryx2 publish and subscribe with several subscribers, woken by one event",
            in_quick=False,
            needs={"iceoryx2": "iceoryx2"},
            lacks={"broadcast-lag": _BLOCKS},
            carries="publications",
        ),
        Contender(
            "aiotensor-in-place",
            "bench.contenders.aiotensor_in_place",
            "aiotensor over `unix://`, decoding into `message.allocate(...)`",
            uses_loop=True,
            lacks={
                "serving-transfer": "its servers decode in shared memory, so that nothing is left to transfer"
            },
            carries="videos",
        ),
        Contender(
            "aiotensor-copying",
            "bench.contenders.aiotensor_copying",
            "aiotensor over `unix://`, decoding in ordinary memory, which `send` copies",
            uses_loop=True,
            carries="videos",
        ),
        Contender(
            "torch-queue-handles",
            "bench.contenders.torch_queue_handles",
            "`torch.multiprocessing.Queue` with handles, in the way of vLLM's tensor IPC",
            uses_loop=True,
            carries="videos",
        ),
        Contender(
            "zmq-pickle-videos",
            "bench.contenders.zmq_pickle_videos",
            "pickle 5 in the ZeroMQ request, frames out of band with `copy=False`",
            uses_loop=True,
            carries="videos",
        ),
    )
}


def missing(needs: Mapping[str, str]) -> list[str]:
    """Return the names of required packages that are not installed; `needs` maps modules to these names."""
    return [name for module, name in needs.items() if find_spec(module) is None]


def why_not(contender: Contender) -> str | None:
    """Return the reason why a contender cannot be measured here, with a remedy; None if it can."""
    absent = missing(contender.needs)
    if not absent:
        return None
    return f"{', '.join(absent)} is not installed; `pip install --group {contender.group}` installs it"
