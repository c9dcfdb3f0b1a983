"""The processes of one endpoint: the run starts, stops, continues, kills and calls them."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from aiotensor import AioTensorError
from aiotensor.transports.endpoints import Endpoint
from verification.chaos import here, journal, sending, taking
from verification.chaos.network import Network, Side
from verification.chaos.plan import ELDERS, FAMILIES, PEER_TIMEOUT_S, SLOTS, Round, SenderPlan, TakerPlan
from verification.loops import Kind
from verification.places import free_port
from verification.processes.peers import Peer, State

__all__ = ["WATCHDOG_S", "Family", "GoneError", "Member", "RoundError"]

P = ParamSpec("P")
R = TypeVar("R")

WATCHDOG_S = 15.0  # far longer than any call takes, even on a busy machine; a slower call hangs

_PROBES = 16  # more than the receiver can have discarded in advance

# ZeroMQ aborts with it if a connection with heartbeats ends while a closing side has unsent messages.
_ABORTED = "Assertion failed: !_io_error"


class RoundError(Exception):
    """A round went wrong."""


class GoneError(Exception):
    """The called process was killed before it returned a result."""


class Member:
    """One process.

    Args:
        endpoint: the endpoint through which it connects to the others.
        folder: the folder for its files.
        name: the name of its files.
        uvloop: whether it runs on uvloop.
        side: its side of the connections.
    """

    def __init__(self, endpoint: Endpoint, folder: str, name: str, *, uvloop: bool, side: Side) -> None:
        self.name = name
        self.is_killed = False
        self.continued_at = 0.0  # when it was last continued
        self.id = ""  # of its sender
        self.first = 0  # the number of its next message
        self.losses = 0  # of receivers, counted at the end of a round
        self.own_descriptors: list[str] | None = None  # besides those of segments, and pipes
        self.own_pipes: int | None = None
        self.has_confirmed_descriptors = False  # in a second round
        self.paused_s = 0.0  # the longest pause in this round or at the end of the one before
        self._last_pause_s = 0.0
        self._path = f"{folder}/{name}"
        open(f"{self._path}.stderr", "w").close()
        self._folder = folder
        self._arguments = side.arguments
        self._peer = Peer(endpoint, kind=Kind("uvloop" if uvloop else "asyncio", "plain"), first=side.enter)
        self.pid = self._peer.pid
        self._gone = asyncio.get_running_loop().create_future()
        self._stops = 0
        self._log_offset = 0
        self.logged: list[str] = []  # the lines of the last `new_log`
        self.is_closed = False

    async def begin(self) -> None:
        """Open its files."""
        await self.call(here.begin, self._folder, self.name, self._arguments)

    async def measure_pause(self) -> None:
        """Measure its longest pause since the last call, which may have effects in the next round."""
        before, self._last_pause_s = self._last_pause_s, await self.call(here.paused_s)
        self.paused_s = max(before, self._last_pause_s)

    async def call(
        self, work: Callable[Concatenate[State, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a coroutine function in the process, and return its result.

        Raises:
            GoneError: it was killed.
            RoundError: it hangs, or died without being killed.
        """
        if self.is_killed:
            raise GoneError(self.name)
        try:
            future = self._peer.start(work, *args, **kwargs)
        except ConnectionError:
            raise await self._died() from None
        ended: set[asyncio.Future[R] | asyncio.Future[None]]
        ended, _ = await asyncio.wait(
            {future, self._gone}, timeout=WATCHDOG_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self._gone.done():
            future.cancel()
            raise GoneError(self.name)
        if not ended:
            await self._say_where()
            raise RoundError(f"{self.name}: {work.__name__} hangs\n{self.complaints}")
        try:
            return future.result()
        except AioTensorError as error:
            raise RoundError(f"{self.name}: {work.__name__} raised {error!r}") from error
        except ConnectionError:
            raise await self._died() from None

    async def _died(self) -> Exception:
        """Return the error that describes how it ended."""
        if self.is_killed:
            return GoneError(self.name)
        status = await self._peer.ended()
        return RoundError(f"{self.name} died by itself, status {status}\n{self.complaints}")

    async def _say_where(self) -> None:
        """Print the tasks of the process to its standard error, or its threads if its loop is stuck."""
        os.kill(self.pid, signal.SIGUSR1)
        await asyncio.wait([self._peer.start(here.say_where)], timeout=5)

    def kill(self) -> float:
        """Kill it, and return the time."""
        self.is_killed = True
        at = time.monotonic()
        self._peer.kill()
        self._gone.set_result(None)
        return at

    async def stop(self, for_s: float) -> None:
        """Stop it for a while."""
        if self.is_killed:
            return
        self._stops += 1
        os.kill(self.pid, signal.SIGSTOP)
        await asyncio.sleep(for_s)
        self._stops -= 1
        if not self._gone.done() and not self._stops:
            self.continued_at = time.monotonic()
            os.kill(self.pid, signal.SIGCONT)

    def events(self) -> Sequence[journal.Event]:
        """Return the events since the start of its current journal."""
        return journal.read(f"{self._path}.journal")

    @property
    def complaints(self) -> str:
        """Return its output on the standard error."""
        with open(f"{self._path}.stderr") as file:
            return file.read()

    def new_log(self) -> list[str]:
        """Return the lines that it logged since the last call."""
        with open(f"{self._path}.log") as file:
            file.seek(self._log_offset)
            lines = file.readlines()
            self._log_offset = file.tell()
        self.logged = lines
        return lines

    async def ended(self) -> None:
        """Wait until it has ended."""
        await self._peer.ended()

    async def finish(self) -> int | None:
        """Wait for its normal exit, and return its exit status."""
        return await asyncio.wait_for(self._peer.finish(), WATCHDOG_S)

    async def close(self) -> None:
        """End it if it is still running, and remove its files; closing again does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        await self._peer.close()
        for kind in ("journal", "stderr", "log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}.{kind}")


class SendersPart(Protocol):
    """The operations of a process that sends tensors or requests."""

    async def open_sender(self, state: State, plan: SenderPlan) -> str: ...
    async def reopen(self, state: State, plan: SenderPlan) -> str: ...
    async def begin_round(self, state: State) -> None: ...
    async def send_all(self, state: State, plan: SenderPlan, part: int, *, pauses: bool) -> None: ...
    async def told(self, state: State) -> int: ...


class ReceiversPart(Protocol):
    """The operations of a process that receives tensors or answers requests."""

    async def open_receiver(self, state: State, plan: TakerPlan) -> None: ...
    async def take(self, state: State, plan: TakerPlan, firsts: Mapping[str, int]) -> None: ...
    async def heard(self, state: State, sender: str) -> int | None: ...
    async def stop(self, state: State) -> None: ...
    async def close(self, state: State) -> None: ...


class Family:
    """A receiver and its senders; killed ones are replaced.

    Args:
        name: one of the names in `FAMILIES`.
    """

    sending: SendersPart = sending
    taking: ReceiversPart = taking
    addresses = 1  # of its network
    timeouts: Mapping[str, Any] = {"peer_timeout_s": PEER_TIMEOUT_S}

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = FAMILIES[name]
        self.receiver: Member
        self.senders: list[Member] = []
        self.notes: list[str] = []  # features that cannot be tested on this machine
        self.dropped: set[tuple[str, int]] = set()  # discarded by the receiver, perhaps before they were sent
        self.has_ended = True  # its receiver is gone and is not replaced
        self._begun = 0
        self._living: list[Member] = []  # includes some closed ones
        self._files = tempfile.mkdtemp(prefix="chaos-")
        self._meeting = tempfile.mkdtemp(prefix="aiotensor-")
        self._endpoint: Endpoint = f"unix://{self._meeting}/s"
        self.network: Network | None = None
        self.listening = self.connecting = Side()
        if self.kind.link == "tcp":
            self._endpoint = f"tcp://127.0.0.1:{free_port()}"
        elif self.kind.link == "hosts":
            self.network = network = Network(self.addresses, self.timeouts)
            self._endpoint = network.addresses[0]
            self.listening, self.connecting = network.listening, network.connecting
            if network.why_whole:
                self.notes.append(f"no partitions in the family {name!r}: {network.why_whole}")

    @property
    def elder(self) -> Member | None:
        """Return the process that lives for the whole run."""
        if self.name not in ELDERS:
            return None
        slot = ELDERS[self.name]
        return self.receiver if slot is None else self.senders[slot]

    @property
    def members(self) -> list[Member]:
        """Return the receiver and the senders."""
        return [self.receiver, *self.senders]

    @property
    def by_slot(self) -> list[tuple[int | None, Member]]:
        """Return all processes, with their targets in the faults of a round."""
        return [(None, self.receiver), *enumerate(self.senders)]

    def left_in_folder(self) -> list[str]:
        """List the files in the shared folder, except the socket."""
        return [name for name in os.listdir(self._meeting) if name != "s"]

    async def new_receiver(self, plan: Round) -> Member:
        """Start a process for a receiver, without opening the receiver."""
        return await self._new("receiver", self.listening, uvloop=plan.taker.uvloop)

    async def new_sender(self, plan: Round, slot: int) -> Member:
        """Start a process with a sender."""
        sender = plan.senders[slot]
        member = await self._new(f"sender-{slot}", self.connecting, uvloop=sender.uvloop)
        member.id = await member.call(self.sending.open_sender, sender)
        return member

    async def prepare(self, plan: Round) -> None:
        """Start and connect all processes if the last ones have ended."""
        if self.has_ended:
            wrong = await self.finish()
            if wrong:
                raise RoundError("\n".join(wrong))
            await self._begin(plan)

    async def probe(self, sender: Member, plan: SenderPlan) -> None:
        """Check that a tensor of a sender arrives, and store the number of the sender's next message."""
        # Between machines, a probe also fails until the sender, too, has detected a loss.
        detected_at = time.monotonic() + (0.0 if self.network is None else 2 * PEER_TIMEOUT_S)
        for attempt in itertools.count(1):
            handle = await sender.call(sending.probe, plan)
            sender.id, sender.first = handle.sender, handle.message + 1
            if await self.receiver.call(taking.take_probe, handle):
                return
            if attempt >= _PROBES and time.monotonic() >= detected_at:
                raise RoundError(f"{sender.name}: {attempt} tensors did not arrive")
            if attempt >= _PROBES:
                await asyncio.sleep(0.001)

    async def finish(self) -> list[str]:
        """End all processes, and return the problems with their exits."""
        wrong = []
        members, self.senders = self.members if self.senders else [], []
        for member in members:
            if not member.is_killed:
                await self.leave(member)
        for member in members:
            if not member.is_killed:
                status = await member.finish()
                if status != 0 or member.complaints:
                    wrong.append(f"{member.name} ended with status {status}\n{member.complaints}")
            await member.close()
        return wrong

    async def leave(self, member: Member) -> None:
        """Close the objects of a process that it does not close on exit."""

    @property
    def has_aborted(self) -> bool:
        """Return whether ZeroMQ has aborted a process, which is a known bug."""
        return any(_ABORTED in member.complaints for member in self._living if not member.is_closed)

    async def abandon(self) -> None:
        """End all processes in the middle of a round; the next round starts new ones."""
        for member in self._living:
            await member.close()
        self.senders, self.has_ended = [], True

    async def close(self) -> None:
        """End all processes, and remove their files."""
        await self.abandon()
        for folder in (self._files, self._meeting):
            shutil.rmtree(folder)
        if self.network is not None:
            self.network.close()

    async def _begin(self, plan: Round) -> None:
        self.receiver, *self.senders = await asyncio.gather(
            self.new_receiver(plan), *(self.new_sender(plan, slot) for slot in range(SLOTS))
        )
        self.dropped.clear()
        await self.receiver.call(self.taking.open_receiver, plan.taker)
        for slot, sender in enumerate(self.senders):
            await self.probe(sender, plan.senders[slot])
        self.has_ended = False

    async def _new(self, role: str, side: Side, *, uvloop: bool) -> Member:
        self._begun += 1
        name = f"{self.name}-{role}-{self._begun}"
        member = Member(self._endpoint, self._files, name, uvloop=uvloop, side=side)
        self._living = [*(one for one in self._living if not one.is_closed), member]
        await member.begin()
        return member
