"""The table of workloads. Their modules are imported only in the processes that measure."""

from bench.records import Effort
from bench.workloads.base import Workload
from verification.networks import NoNamespacesError, two_hosts

__all__ = ["WORKLOADS", "why_unavailable"]

_KIB, _MIB = 1 << 10, 1 << 20
_ENDS = (4 * _KIB, 150 * _MIB)
_READERS = (1, 2, 4, 8)

_QUEUES = ("aiotensor-message-queue", "torch-queue")
_LINKS = ("aiotensor-unix", "aiotensor-tcp", "aiotensor-curve")
_PUBLISHED = ("aiotensor-publisher", "zmq-xpub", "iceoryx2")
_ALLOCATED = (Effort(rounds=3, most=1000, fewest=1000), Effort(most=200, fewest=200))
_TRIPS = (
    Effort(rounds=3, bytes=256 * _MIB, most=600, fewest=8),
    Effort(bytes=96 * _MIB, most=200, fewest=3),
)
_REQUESTS = (
    Effort(rounds=3, bytes=256 * _MIB, most=2000, fewest=6),
    Effort(bytes=96 * _MIB, most=500, fewest=3),
)
_IDLE = (Effort(seconds=10.0), Effort(seconds=3.0))
_SERVED = (Effort(rounds=3, most=1000), Effort(most=200))
_ANSWERED = ("aiotensor-channel", "zmq-request")

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "round-trip",
            "round_trip",
            "Round trip of a tensor from ordinary memory",
            (
                *(*_LINKS, "aiotensor-ranks", *_QUEUES, "zmq-ipc", "zmq-tcp", "gloo", "iceoryx2"),
                *("raw-socket", "tcp-socket", "raw-socket-loop", "memcpy"),
            ),
            *_TRIPS,
            in_quick=True,
        ),
        Workload(
            "allocated",
            "round_trip",
            "Round trip of a tensor that was allocated in the contender's own memory",
            ("aiotensor-unix", "iceoryx2"),
            *_ALLOCATED,  # nothing is copied, so that large tensors make as many trips as small ones
            baseline="aiotensor-unix",
            source="allocated",
            in_quick=True,
        ),
        Workload(
            "chain",
            "chain",
            "An allocated tensor, sent on by two further processes",
            ("aiotensor-chain",),
            *_ALLOCATED,
            baseline="aiotensor-chain",
            sizes=_ENDS,
            peers=(2,),
            source="allocated",
            single_is_near=True,
            in_quick=True,
        ),
        Workload(
            "two-hosts",
            "round_trip",
            "Round trip of a tensor from ordinary memory between two hosts",
            ("aiotensor-ranks", "zmq-tcp", "gloo", "tcp-socket"),
            *_TRIPS,
            baseline="gloo",
            between_hosts=True,
        ),
        Workload(
            "pipelined",
            "one_way",
            "One way, with 64 tensors in flight",
            (*_LINKS, *_QUEUES, "zmq-ipc", "gloo", "iceoryx2"),
            Effort(rounds=3, bytes=256 * _MIB, most=50_000, fewest=1000, seconds=0.7),
            Effort(bytes=128 * _MIB, most=30_000, fewest=500, seconds=0.3),
            score="tensors_per_s",
            sizes=(4 * _KIB,),
            depth=64,
            both_ways=False,
            single_is_near=True,
            in_quick=True,
        ),
        Workload(
            "fan-in",
            "one_way",
            "Many senders to one receiver",
            ("aiotensor-unix", "aiotensor-tcp", *_QUEUES, "zmq-ipc", "gloo", "iceoryx2"),
            Effort(rounds=2, bytes=1024 * _MIB, most=50_000, fewest=20, seconds=0.5),
            Effort(bytes=256 * _MIB, most=20_000, fewest=10, seconds=0.2),
            score="tensors_per_s",
            sizes=(4 * _KIB, _MIB),
            peers=(1, 4, 16),
            both_ways=False,
            single_is_near=True,
        ),
        Workload(
            "producers",
            "one_way",
            "Four processes that compute each tensor with torch, to one receiver",
            _QUEUES,
            Effort(rounds=3, bytes=1024 * _MIB, most=800, fewest=20, seconds=2.0),
            Effort(bytes=256 * _MIB, most=200, fewest=10, seconds=0.5),
            score="tensors_per_s",
            sizes=(1_200_000,),
            peers=(4,),
            source="computed",
            both_ways=False,
            single_is_near=True,
        ),
        Workload(
            "loop-lag",
            "loop_lag",
            "Lateness of a 1 ms ticker on the loops of a sender and a receiver, 150 MiB back to back",
            (*_LINKS, "aiotensor-message-queue"),
            Effort(rounds=2, seconds=3.0),
            Effort(seconds=1.0),
            baseline="aiotensor-unix",
            score="beyond_p999_s",
            sizes=(150 * _MIB,),
            both_ways=False,
            in_quick=True,
        ),
        Workload(
            "idle",
            "idle",
            "CPU of a connected pair that does nothing",
            ("aiotensor-unix", "aiotensor-tcp", *_QUEUES, "zmq-ipc"),
            *_IDLE,
            score="cpu_percent",
            sizes=(4 * _KIB,),
        ),
        Workload(
            "request-echo",
            "request",
            "Request and answer, with tensors of the same size",
            (*_ANSWERED, "zmq-ipc", "raw-socket-loop"),
            *_REQUESTS,
            baseline="zmq-request",
            sizes=(4 * _KIB, _MIB, 150 * _MIB),
            in_quick=True,
        ),
        Workload(
            "request-answer",
            "request",
            "Request and answer, which contains an embedding of 4 KiB",
            _ANSWERED,
            *_REQUESTS,
            baseline="zmq-request",
            sizes=(4 * _KIB, _MIB, 150 * _MIB),
            answer_bytes=4 * _KIB,
        ),
        Workload(
            "broadcast",
            "broadcast",
            "A tensor from ordinary memory to several readers",
            _PUBLISHED,
            Effort(rounds=3, bytes=128 * _MIB, most=500, fewest=6),
            Effort(bytes=32 * _MIB, most=200, fewest=3),
            baseline="zmq-xpub",
            sizes=(4 * _KIB, _MIB, 150 * _MIB),
            peers=_READERS,
            is_apart=True,
            depth=2,
            both_ways=False,
            broadcasts=True,
            single_is_near=True,
        ),
        Workload(
            "broadcast-lag",
            "loop_lag",
            "Lateness of a 1 ms ticker on the loops of a publisher and 4 readers, 150 MiB back to back",
            ("aiotensor-publisher",),
            Effort(rounds=2, seconds=3.0),
            Effort(seconds=2.0),
            baseline="aiotensor-publisher",
            score="beyond_p999_s",
            sizes=(150 * _MIB,),
            peers=(4,),
            both_ways=False,
            broadcasts=True,
            single_is_near=True,
        ),
        Workload(
            "broadcast-idle",
            "idle",
            "CPU of a publisher and 8 readers that do nothing",
            ("aiotensor-publisher", "zmq-xpub"),
            *_IDLE,
            baseline="zmq-xpub",
            score="cpu_percent",
            sizes=(4 * _KIB,),
            peers=(8,),
            both_ways=False,
            broadcasts=True,
            single_is_near=True,
        ),
        Workload(
            "serving-decoding",
            "serving",
            "Three API servers that decode videos, and one engine",
            ("aiotensor-in-place", "aiotensor-copying", "torch-queue-handles", "zmq-pickle-videos"),
            *_SERVED,
            baseline="torch-queue-handles",
            score="requests_per_s",
            sizes=(9 * _MIB // 2,),
            peers=(3,),
            depth=140,
            source="decoded",
            both_ways=False,
            single_is_near=True,
            deadline_s=120.0,
        ),
        Workload(
            "serving-transfer",
            "serving",
            "Three API servers that have decoded videos, and one engine",
            ("aiotensor-copying", "torch-queue-handles", "zmq-pickle-videos"),
            *_SERVED,
            baseline="torch-queue-handles",
            score="requests_per_s",
            sizes=(9 * _MIB // 2,),
            peers=(3,),
            depth=140,
            both_ways=False,
            single_is_near=True,
            deadline_s=120.0,
        ),
    )
}


def why_unavailable(workload: Workload) -> str | None:
    """Return the reason why a workload cannot be measured here; None if it can."""
    if workload.between_hosts:
        try:
            with two_hosts():
                pass
        except NoNamespacesError as error:
            return str(error)
    return None
