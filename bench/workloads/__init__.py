"""The table of workloads. Their modules are imported only in the processes that measure."""

from typing import TypedDict

from bench.records import Cargo, Effort, Reply, Source
from bench.workloads.base import Workload
from verification.networks import NoNamespacesError, two_hosts

__all__ = ["WORKLOADS", "why_unavailable"]

_KIB, _MIB = 1 << 10, 1 << 20
_REPLIES: dict[Reply, str] = {
    "echo": "a message with a tensor of the same size",
    "answer": "a message with an embedding of 4 KiB",
}
_SERVED: dict[str, tuple[Source, str]] = {
    "decoding": ("decoded", "decode videos"),
    "transfer": ("copied", "have decoded videos"),
}

_ENDS = (4 * _KIB, 150 * _MIB)
_READERS = (1, 2, 4, 8)


class _Published(TypedDict):
    both_ways: bool
    single_is_near: bool
    peer: str
    carries: Cargo


_PUBLISHED: _Published = {
    "both_ways": False,
    "single_is_near": True,
    "peer": "reader",
    "carries": "publications",
}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="round-trip",
            module="bench.workloads.round_trip",
            title="Round trip of a tensor from ordinary memory",
            score="median_s",
            more_is_better=False,
            full=Effort(rounds=3, bytes=256 * _MIB, most=600, fewest=8),
            quick=Effort(rounds=1, bytes=96 * _MIB, most=200, fewest=3),
            in_quick=True,
        ),
        Workload(
            name="allocated",
            module="bench.workloads.round_trip",
            title="Round trip of a tensor that was allocated in the contender's own memory",
            score="median_s",
            more_is_better=False,
            # Nothing is copied, so that large tensors make as many trips as small ones.
            full=Effort(rounds=3, most=1000, fewest=1000),
            quick=Effort(rounds=1, most=200, fewest=200),
            in_quick=True,
            source="allocated",
        ),
        Workload(
            name="chain",
            module="bench.workloads.chain",
            title="An allocated tensor, sent on by two further processes",
            score="median_s",
            more_is_better=False,
            full=Effort(rounds=3, most=1000, fewest=1000),
            quick=Effort(rounds=1, most=200, fewest=200),
            in_quick=True,
            sizes=_ENDS,
            peers=(2,),
            peer="process",
            is_apart=True,
            source="allocated",
            single_is_near=True,
            carries="chains",
        ),
        Workload(
            name="two-hosts",
            module="bench.workloads.round_trip",
            title="Round trip of a tensor from ordinary memory between two hosts",
            score="median_s",
            more_is_better=False,
            full=Effort(rounds=3, bytes=256 * _MIB, most=600, fewest=8),
            quick=Effort(rounds=1, bytes=96 * _MIB, most=200, fewest=3),
            baseline="gloo",
            between_hosts=True,
        ),
        Workload(
            name="pipelined",
            module="bench.workloads.one_way",
            title="One way, with 64 tensors in flight",
            score="tensors_per_s",
            more_is_better=True,
            full=Effort(rounds=3, bytes=256 * _MIB, most=50_000, fewest=1000, seconds=0.7),
            quick=Effort(rounds=1, bytes=128 * _MIB, most=30_000, fewest=500, seconds=0.3),
            in_quick=True,
            sizes=(4 * _KIB,),
            depth=64,
            both_ways=False,
            single_is_near=True,
        ),
        Workload(
            name="fan-in",
            module="bench.workloads.one_way",
            title="Many senders to one receiver",
            score="tensors_per_s",
            more_is_better=True,
            full=Effort(rounds=2, bytes=1024 * _MIB, most=50_000, fewest=20, seconds=0.5),
            quick=Effort(rounds=1, bytes=256 * _MIB, most=20_000, fewest=10, seconds=0.2),
            sizes=(4 * _KIB, _MIB),
            peers=(1, 4, 16),
            both_ways=False,
            single_is_near=True,
        ),
        Workload(
            name="producers",
            module="bench.workloads.one_way",
            title="Four processes that compute each tensor with torch, to one receiver",
            score="tensors_per_s",
            more_is_better=True,
            full=Effort(rounds=3, bytes=1024 * _MIB, most=800, fewest=20, seconds=2.0),
            quick=Effort(bytes=256 * _MIB, most=200, fewest=10, seconds=0.5),
            sizes=(1_200_000,),
            peers=(4,),
            source="computed",
            both_ways=False,
            single_is_near=True,
        ),
        Workload(
            name="loop-lag",
            module="bench.workloads.loop_lag",
            title="Lateness of a 1 ms ticker on the sender's event loop, 150 MiB tensors back to back",
            score="beyond_p999_s",
            more_is_better=False,
            full=Effort(rounds=2, seconds=3.0),
            quick=Effort(rounds=1, seconds=1.0),
            in_quick=True,
            sizes=(150 * _MIB,),
            both_ways=False,
        ),
        Workload(
            name="idle",
            module="bench.workloads.idle",
            title="CPU of a connected pair that does nothing",
            score="cpu_percent",
            more_is_better=False,
            full=Effort(seconds=10.0),
            quick=Effort(seconds=3.0),
            sizes=(4 * _KIB,),
            side_by_side=True,
        ),
        Workload(
            name="cost",
            module="bench.workloads.cost",
            title="CPU time and shared memory of a stream of tensors",
            score="cpu_s_per_gb",
            more_is_better=False,
            full=Effort(rounds=2, bytes=1536 * _MIB, most=400, fewest=6),
            quick=Effort(rounds=1, bytes=768 * _MIB, most=200, fewest=4),
            sizes=(_MIB, 150 * _MIB),
            both_ways=False,
        ),
        Workload(
            name="resident",
            module="bench.workloads.resident",
            title="Resident memory over many sends",
            score="growth_bytes",
            more_is_better=False,
            full=Effort(most=100_000),
            quick=Effort(most=5_000),
            sizes=(4 * _KIB, 256 * _KIB),
            both_ways=False,
            deadline_s=180.0,
        ),
        *(
            Workload(
                name=f"request-{reply}",
                module="bench.workloads.request",
                title=f"Request and reply, the answer being {answer}",
                score="median_s",
                more_is_better=False,
                full=Effort(rounds=3, bytes=256 * _MIB, most=2000, fewest=6),
                quick=Effort(rounds=1, bytes=96 * _MIB, most=500, fewest=3),
                in_quick=reply == "echo",
                sizes=(4 * _KIB, _MIB, 150 * _MIB),
                reply=reply,
                carries="messages",
                baseline="zmq-request",
            )
            for reply, answer in _REPLIES.items()
        ),
        Workload(
            name="broadcast",
            module="bench.workloads.broadcast",
            title="A tensor from ordinary memory to several readers",
            score="median_s",
            more_is_better=False,
            full=Effort(rounds=3, bytes=128 * _MIB, most=500, fewest=6),
            quick=Effort(bytes=32 * _MIB, most=200, fewest=3, sizes=_ENDS),
            **_PUBLISHED,
            baseline="zmq-xpub",
            peers=_READERS,
            is_apart=True,
            depth=2,
        ),
        Workload(
            name="broadcast-allocated",
            module="bench.workloads.broadcast",
            title="A tensor that was allocated in the contender's own memory, to several readers",
            score="median_s",
            more_is_better=False,
            full=Effort(rounds=3, most=100, fewest=100),
            quick=Effort(most=40, fewest=40),
            **_PUBLISHED,
            baseline="iceoryx2-readers",
            sizes=_ENDS,
            peers=_READERS,
            is_apart=True,
            depth=2,
            source="allocated",
        ),
        Workload(
            name="broadcast-stream",
            module="bench.workloads.broadcast_stream",
            title="A stream of tensors to several readers",
            score="tensors_per_s",
            more_is_better=True,
            full=Effort(rounds=2, bytes=512 * _MIB, most=3000, fewest=4),
            quick=Effort(bytes=256 * _MIB, most=1000, fewest=2),
            **_PUBLISHED,
            baseline="zmq-xpub",
            sizes=_ENDS,
            peers=_READERS,
            is_apart=True,
            depth=4,
        ),
        Workload(
            name="broadcast-lag",
            module="bench.workloads.broadcast_lag",
            title="Lateness of a 1 ms ticker on the loops of a publisher and 4 readers, 150 MiB back to back",
            score="beyond_p999_s",
            more_is_better=False,
            full=Effort(rounds=2, seconds=3.0),
            quick=Effort(seconds=2.0),
            **_PUBLISHED,
            baseline="aiotensor-publisher",
            sizes=(150 * _MIB,),
            peers=(4,),
        ),
        Workload(
            name="broadcast-idle",
            module="bench.workloads.idle",
            title="CPU of a publisher and 8 readers that do nothing",
            score="cpu_percent",
            more_is_better=False,
            full=Effort(seconds=10.0),
            quick=Effort(seconds=3.0),
            **_PUBLISHED,
            baseline="zmq-xpub",
            sizes=(4 * _KIB,),
            peers=(8,),
            side_by_side=True,
        ),
        *(
            Workload(
                name=f"serving-{name}",
                module="bench.workloads.serving",
                title=f"Three API servers that {task}, and one engine",
                score="requests_per_s",
                more_is_better=True,
                full=Effort(rounds=3, most=1000),
                quick=Effort(most=200),
                sizes=(9 * _MIB // 2,),
                peers=(3,),
                peer="server",
                depth=140,
                source=source,
                both_ways=False,
                single_is_near=True,
                deadline_s=120.0,
                carries="videos",
                baseline="torch-queue-handles",
            )
            for name, (source, task) in _SERVED.items()
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
