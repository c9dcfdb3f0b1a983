"""The table of contenders. Their modules are imported only in the processes that measure them."""

from bench.contenders.base import Contender

__all__ = ["CONTENDERS"]

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("aiotensor-unix", "aiotensor_links", "aiotensor over `unix://`"),
        Contender(
            "aiotensor-tcp",
            "aiotensor_links",
            "aiotensor over `tcp://` on the loopback",
            options={"kind": "tcp"},
        ),
        Contender(
            "aiotensor-curve",
            "aiotensor_links",
            "the same with keys: CURVE encrypts all bytes",
            options={"kind": "curve"},
            in_quick=False,
        ),
        Contender(
            "aiotensor-chain",
            "aiotensor_links",
            "aiotensor over `unix://`, from process to process",
            options={"kind": "chain"},
        ),
        Contender(
            "aiotensor-message-queue",
            "aiotensor_message_queue",
            "aiotensor over a `MessageQueue`",
            in_quick=False,
        ),
        Contender(
            "aiotensor-ranks",
            "aiotensor_ranks",
            "aiotensor's `RankPipe`: shared memory on one host, TCP between two",
        ),
        Contender("aiotensor-channel", "aiotensor_channel", "aiotensor's requests over `unix://`"),
        Contender(
            "aiotensor-publisher",
            "aiotensor_publisher",
            "aiotensor's publisher and subscribers over `unix://`",
        ),
        Contender(
            "aiotensor-in-place",
            "aiotensor_videos",
            "aiotensor's requests over `unix://`, decoding into `permit.allocate(...)`",
            options={"in_place": True},
        ),
        Contender(
            "aiotensor-copying",
            "aiotensor_videos",
            "aiotensor's requests over `unix://`, decoding in ordinary memory, which `request` copies",
        ),
        Contender(
            "torch-queue",
            "torch_queue",
            "bare `torch.multiprocessing.Queue`, sharing by file descriptor, as is the default",
        ),
        Contender(
            "torch-queue-handles",
            "torch_queue_handles",
            "`torch.multiprocessing.Queue` with handles, in the way of vLLM's tensor IPC",
        ),
        Contender(
            "zmq-ipc",
            "zmq_bare",
            "bare ZeroMQ over `ipc://`, blocking, with `copy=False`: PAIR, or PUSH to PULL one way",
        ),
        Contender("zmq-tcp", "zmq_bare", "the same over TCP", options={"over": "tcp"}, in_quick=False),
        Contender(
            "zmq-request",
            "zmq_request",
            "pyzmq over `ipc://`, DEALER to ROUTER, blocking: a header, and the tensor with `copy=False`",
        ),
        Contender(
            "zmq-pickle-videos",
            "zmq_pickle_videos",
            "pickle 5 in the ZeroMQ request, frames out of band with `copy=False`",
        ),
        Contender(
            "zmq-xpub",
            "zmq_xpub",
            "ZeroMQ XPUB and SUB over `ipc://`, pickle 5, out of band with `copy=False`",
        ),
        Contender(
            "gloo", "gloo", "torch.distributed isend and irecv on gloo: a header with the size, and the bytes"
        ),
        Contender(
            "iceoryx2",
            "iceoryx",
            "iceoryx2 publish and subscribe, woken by its events",
            in_quick=False,
            needs="iceoryx2",
        ),
        Contender(
            "raw-socket", "blocking_socket", "limit: bytes over a Unix stream socket, blocking", is_limit=True
        ),
        Contender(
            "tcp-socket",
            "blocking_socket",
            "limit: bytes over a TCP socket, blocking, into warm memory",
            options={"over": "tcp"},
            is_limit=True,
        ),
        Contender(
            "raw-socket-loop",
            "socket_in_callbacks",
            "limit: msgspec frames over a Unix record socket, in callbacks of the event loop",
            is_limit=True,
            drives_itself=True,
            largest=64 << 10,
        ),
        Contender(
            "memcpy",
            "memcpy",
            "limit: two copies into warm memory, each by two threads",
            is_limit=True,
            alone=True,
        ),
    )
}
