"""One contender in real processes: its measurements, and its end after a failure."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

from bench.contenders import CONTENDERS, why_not
from bench.contenders.base import Contender
from bench.group import FailedError, Groups
from bench.harness import Step, measure
from bench.plan import Options, make_plan
from bench.records import Batch, Effort, Loop, Spec
from bench.workloads import WORKLOADS, why_unavailable
from tests.bench.reports import contender
from tests.sending.test_memory import MIB

ContenderOf = Callable[..., Contender]

EFFORT = Effort(bytes=1 << 16, most=20, fewest=2, seconds=0.02)
RAW = contender("raw", module="bench.contenders.raw_socket")
PATIENT_S = 60.0
ASKING = [
    (one.name, workload, loop)
    for one in CONTENDERS.values()
    for workload in ("request-echo", "request-answer")
    for loop in (("asyncio", "uvloop") if one.uses_loop else ("asyncio",))
    if one.carries == "messages" and workload not in one.lacks
]


BROADCASTING = [
    (one.name, workload, loop)
    for one in CONTENDERS.values()
    for workload in ("broadcast", "broadcast-allocated")
    for loop in (("asyncio", "uvloop") if one.uses_loop else ("asyncio",))
    if one.carries == "publications" and workload not in one.lacks and why_not(one) is None
]


SPANNING = [
    (one.name, workload, loop)
    for one in CONTENDERS.values()
    for workload in ("round-trip", "two-hosts")
    for loop in (("asyncio", "uvloop") if one.uses_loop else ("asyncio",))
    if one.spans_hosts and workload not in one.lacks
]


SERVING = [
    (one.name, workload, loop)
    for one in CONTENDERS.values()
    for workload, loop in (("serving-decoding", "uvloop"), ("serving-transfer", "asyncio"))
    if one.carries == "videos" and workload not in one.lacks
]


@pytest.fixture
def contender_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContenderOf:
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, body: str, **fields: object) -> Contender:
        (tmp_path / f"{name}.py").write_text(dedent(body))
        return contender(name, **fields)

    return write


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Start the server of processes before any test counts seconds."""
    with Groups() as groups:
        run(groups, RAW)


@pytest.fixture
def groups() -> Iterator[Groups]:
    with Groups() as opened:
        yield opened


def run(
    groups: Groups,
    one: Contender,
    workload: str = "round-trip",
    deadline_s: float = PATIENT_S,
    sizes: tuple[int, ...] | None = None,
    loop: Loop = "asyncio",
    peers: tuple[int, ...] | None = None,
) -> list[Batch]:
    row = WORKLOADS[workload]
    spec = Spec(
        workload,
        sizes or row.sizes or (64, 4096),
        EFFORT,
        peers=peers or row.peers,
        depth=row.depth,
        source=row.source,
        reply=row.reply,
        loop=loop,
    )
    batches: list[Batch] = []
    groups.run(one, spec, deadline_s, batches.append)
    return batches


def failure_of(
    groups: Groups, one: Contender, deadline_s: float = PATIENT_S, workload: str = "round-trip"
) -> FailedError:
    with pytest.raises(FailedError) as caught:
        run(groups, one, workload, deadline_s, sizes=(64, 4096), peers=(1,))
    return caught.value


def test_round_trips_are_timed_at_each_size(groups: Groups) -> None:
    batches = run(groups, RAW)
    assert [(batch.size_bytes, len(batch.latencies_ns)) for batch in batches] == [(64, 20), (4096, 16)]
    assert all(latency > 0 for batch in batches for latency in batch.latencies_ns)


def test_contenders_may_drive_themselves_or_consist_of_one_process(groups: Groups) -> None:
    driven = contender("driven", module="bench.contenders.raw_socket_loop", drives_itself=True)
    alone = contender("alone", module="bench.contenders.memcpy_two", alone=True)
    for one in (driven, alone):
        assert [len(batch.latencies_ns) for batch in run(groups, one)] == [20, 16]


@pytest.mark.parametrize(("name", "workload", "loop"), SPANNING)
def test_round_trips_are_timed_on_one_host_and_between_two_hosts(
    groups: Groups, name: str, workload: str, loop: Loop
) -> None:
    if reason := why_unavailable(WORKLOADS[workload]):
        pytest.skip(reason)
    batches = run(groups, CONTENDERS[name], workload, sizes=(64, 4096, 2 * MIB), loop=loop)
    assert [(batch.size_bytes, len(batch.latencies_ns)) for batch in batches] == [
        (64, 20),
        (4096, 16),
        (2 * MIB, 2),
    ]


def test_processes_on_two_hosts_have_separate_network_namespaces(
    groups: Groups, contender_of: ContenderOf, tmp_path: Path
) -> None:
    if reason := why_unavailable(WORKLOADS["two-hosts"]):
        pytest.skip(reason)
    entered = f"""
        import os, pathlib
        from contextlib import asynccontextmanager
        from bench.contenders import raw_socket

        class Side(raw_socket.SocketSide):
            @asynccontextmanager
            async def open(self):
                network = os.stat("/proc/thread-self/ns/net").st_ino
                pathlib.Path({str(tmp_path)!r}, str(os.getpid())).write_text(str(network))
                async with super().open() as port:
                    yield port

        raw_socket.SocketSide = Side
        connect = raw_socket.connect
    """
    run(groups, contender_of("entered", entered, spans_hosts=True), "two-hosts")
    networks = [int(path.read_text()) for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert len(networks) == 2
    assert len({os.stat("/proc/self/ns/net").st_ino, *networks}) == 3


@pytest.mark.parametrize(("name", "workload", "loop"), ASKING)
def test_requests_are_answered_and_timed_at_each_size(
    groups: Groups, name: str, workload: str, loop: Loop
) -> None:
    batches = run(groups, CONTENDERS[name], workload, sizes=(64, 4096, MIB), loop=loop)
    assert [(batch.size_bytes, len(batch.latencies_ns)) for batch in batches] == [
        (64, 20),
        (4096, 16),
        (MIB, 2),
    ]
    assert all(latency > 0 for batch in batches for latency in batch.latencies_ns)


@pytest.mark.parametrize(("name", "workload", "loop"), BROADCASTING)
def test_a_publication_is_timed_until_all_readers_have_touched_it(
    groups: Groups, name: str, workload: str, loop: Loop
) -> None:
    batches = run(groups, CONTENDERS[name], workload, sizes=(64, 16384, MIB), loop=loop, peers=(3,))
    assert [(batch.size_bytes, batch.peers, len(batch.latencies_ns)) for batch in batches] == [
        (64, 3, 20),
        (16384, 3, 4),
        (MIB, 3, 2),
    ]
    assert all(latency > 0 for batch in batches for latency in batch.latencies_ns)


def test_wrong_content_at_a_reader_is_reported(groups: Groups, contender_of: ContenderOf) -> None:
    wrong = """
        from bench.contenders import aiotensor_link, aiotensor_senders

        class Port(aiotensor_link.LinkPort):
            async def receive(self): return (await super().receive()).fill_(251)

        class Side(aiotensor_link.LinkSide):
            def open(self):
                aiotensor_link.LinkPort = Port
                return super().open()

        def connect(layout):
            readers, senders = aiotensor_senders.connect(layout)
            return [Side(None, one.incoming, one.depth, one.arena_bytes) for one in readers], senders
    """
    one = contender_of("wrong", wrong, carries="publications", uses_loop=True)
    assert "brought back another tensor" in failure_of(groups, one, workload="broadcast").output


def test_the_lag_is_measured_on_both_sides_of_a_broadcast(groups: Groups) -> None:
    (batch,) = run(groups, CONTENDERS["aiotensor-publisher"], "broadcast-lag", sizes=(MIB,), peers=(2,))
    assert batch.peers == 2
    for side in ("", "subscriber_"):
        assert 0 < batch.numbers[f"{side}busy_p50_s"] <= batch.numbers[f"{side}busy_max_s"]


@pytest.mark.parametrize("workload", ["broadcast-stream", "broadcast-idle"])
def test_streams_to_readers_and_their_idle_time_are_measured(groups: Groups, workload: str) -> None:
    (batch,) = run(groups, CONTENDERS["aiotensor-publisher"], workload, sizes=(4096,), peers=(2,))
    assert batch.peers == 2
    assert batch.numbers["tensors_per_s" if workload == "broadcast-stream" else "cpu_percent"] >= 0


@pytest.mark.parametrize(("name", "workload", "loop"), SERVING)
def test_servers_are_answered_and_their_cost_is_measured(
    groups: Groups, name: str, workload: str, loop: Loop
) -> None:
    (batch,) = run(groups, CONTENDERS[name], workload, sizes=(2 * MIB,), loop=loop)
    numbers = batch.numbers
    assert batch.peers == 3
    assert 0 < numbers["median_s"] <= numbers["p99_s"]
    assert 0 < numbers["late_p50_s"] <= numbers["late_max_s"]
    assert min(numbers["requests_per_s"], numbers["cpu_s_per_request"]) > 0
    assert {"peak_bytes", "after_private_bytes", "after_shared_bytes"} <= numbers.keys()


def test_an_answer_for_other_frames_is_reported(groups: Groups, contender_of: ContenderOf) -> None:
    wrong = """
        from bench.contenders import zmq_pickle_videos

        class Port(zmq_pickle_videos.UploadPort):
            async def request(self, frames):
                frames[0, 0, 0, 0] += 1
                return await super().request(frames)

        class Side(zmq_pickle_videos.ServerSide):
            def open(self):
                zmq_pickle_videos.UploadPort = Port
                return super().open()

        def connect(layout):
            servers, engine = zmq_pickle_videos.connect(layout)
            return [Side(one.permits, one.requests) for one in servers], engine
    """
    one = contender_of("wrong", wrong, carries="videos", uses_loop=True)
    with pytest.raises(FailedError) as caught:
        run(groups, one, "serving-decoding", sizes=(2 * MIB,))
    assert "was answered for other frames" in caught.value.output


def test_a_pipelined_workload_measures_tensors_per_second(groups: Groups) -> None:
    (batch,) = run(groups, RAW, "pipelined")
    assert batch.numbers["tensors_per_s"] > 0


def test_a_crash_is_reported_with_the_output_of_the_process(
    groups: Groups, contender_of: ContenderOf
) -> None:
    error = failure_of(
        groups, contender_of("crashing", "def connect(layout): raise RuntimeError('out of luck')")
    )
    assert str(error) == "ended with exit status 1 before it finished 64 B"
    assert error.size == 64
    assert "out of luck" in error.output


def test_a_hanging_contender_is_killed_and_reported(
    groups: Groups, contender_of: ContenderOf, tmp_path: Path
) -> None:
    hanging = f"""
        import os, pathlib, threading
        pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(os.getpid()))
        threading.Event().wait()
    """
    error = failure_of(groups, contender_of("hanging", hanging), deadline_s=3.0)
    assert "did not finish 64 B" in str(error)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


DYING = """
    import os, threading
    from contextlib import asynccontextmanager

    class Port:
        overlaps = False
        async def send(self, tensor): pass
        async def receive(self): threading.Event().wait()

    class Near:
        @asynccontextmanager
        async def open(self): yield Port()

    class Far:
        def open(self): os._exit(7)

    def connect(layout): return [Near()], Far()
"""


def test_the_death_of_an_answering_process_is_reported(groups: Groups, contender_of: ContenderOf) -> None:
    error = failure_of(groups, contender_of("dying", DYING))
    assert "an answering process ended with exit status 7" in error.output


def test_a_returned_tensor_with_wrong_content_is_reported(groups: Groups, contender_of: ContenderOf) -> None:
    wrong = """
        from bench.contenders import raw_socket

        class Port(raw_socket.SocketPort):
            async def receive(self): return (await super().receive()).fill_(255)

        raw_socket.SocketPort = Port
        connect = raw_socket.connect
    """
    assert "brought back another tensor" in failure_of(groups, contender_of("wrong", wrong)).output


@pytest.mark.parametrize("answer", ["Video(0.0, given.fill_(250))", "Video(0.0, given[1:])"])
def test_a_wrong_answer_to_a_request_is_reported(
    groups: Groups, contender_of: ContenderOf, answer: str
) -> None:
    wrong = f"""
        from bench.contenders import zmq_echo
        from bench.messages import Video

        class Port(zmq_echo.EchoPort):
            async def request(self, message):
                given = (await super().request(message)).frames
                return {answer}

        zmq_echo.EchoPort = Port
        connect = zmq_echo.connect
    """
    error = failure_of(groups, contender_of("wrong", wrong, carries="messages"), workload="request-echo")
    assert "brought back another tensor" in error.output


def test_a_wrong_answer_in_a_callback_is_reported(groups: Groups, contender_of: ContenderOf) -> None:
    wrong = """
        from bench.contenders import zmq_echo_loop
        from bench.contenders.in_callbacks import far, near

        class BrokenPort(zmq_echo_loop.LoopEchoPort):
            def receive(self, size): return super().receive(size).fill_(255)

        zmq_echo_loop.LoopEchoPort = BrokenPort
        connect = zmq_echo_loop.connect
    """
    one = contender_of("wrong", wrong, carries="messages", drives_itself=True)
    error = failure_of(groups, one, workload="request-echo")
    assert "brought back another tensor" in error.output


def test_leaving_the_block_of_groups_ends_running_contenders(
    contender_of: ContenderOf, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    endless = f"import threading; open({str(started)!r}, 'w').close(); threading.Event().wait()"
    one = contender_of("endless", endless)
    # Another thread runs the group, as with an interrupt.
    with ThreadPoolExecutor() as pool, Groups() as groups:
        future = pool.submit(run, groups, one)
        started.read_bytes()  # returns when the child has opened the other end and closed it
    with pytest.raises(RuntimeError, match="ended from outside"):
        future.result()


def test_a_failed_contender_is_left_out_of_later_rounds(contender_of: ContenderOf) -> None:
    them = {one.name: one for one in (contender_of("broken", "import no_such_module"), RAW)}
    options = Options(False, (64,), ("asyncio",), rounds=2, deadline_s=PATIENT_S, workloads=("round-trip",))
    plan = make_plan(
        options,
        them,
        {"round-trip": WORKLOADS["round-trip"]._replace(full=EFFORT)},
        lambda one: None,
        lambda one: None,
    )
    steps: list[Step] = []
    report = measure(plan, options, baseline="raw", on_step=steps.append)
    (result,) = report.results
    assert (result.contender, result.trips, len(result.rounds)) == ("raw", 40, 2)
    (failure,) = report.failures
    assert (failure.contender, failure.round, failure.workload) == ("broken", 0, "round-trip")
    assert "no_such_module" in failure.output
    assert sum(step.lost + (step.batch is not None) for step in steps) == plan.batches
