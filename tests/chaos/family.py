"""The processes of one endpoint, as the run sees them: begun, stopped, continued, killed, and asked."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from aiotensor import AioTensorError, TensorQueue
from aiotensor.links import Endpoint
from tests.chaos import here, journal, sending, taking
from tests.chaos.plan import ELDERS, FAMILIES, SLOTS, Round, SenderPlan, TakerPlan
from tests.loops import Kind
from tests.processes.peers import Peer, State

__all__ = ["WATCHDOG_S", "Family", "GoneError", "Member", "RoundError"]

P = ParamSpec("P")
R = TypeVar("R")

WATCHDOG_S = 15.0  # far beyond what anything here takes, also on a busy machine: then it hangs

# With heartbeats, when a connection ends while a side that closes still has messages to send.
_ABORTED = "Assertion failed: !_io_error"

_PROBES = 16  # more than the receiver can have discarded before they were sent


class RoundError(Exception):
    """Something happened in a round that must not."""


class GoneError(Exception):
    """Who was asked was killed meanwhile."""


class Member:
    """One process.

    Args:
        endpoint: where it meets the others.
        folder: for its files.
        name: of them.
        uvloop: whether it runs on that event loop.
        first: called there before anything else.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        folder: str,
        name: str,
        *,
        uvloop: bool,
        first: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.is_killed = False
        self.continued_at = 0.0  # when it was last continued
        self.id = ""  # of its sender
        self.first = 0  # the number of its next message
        self.losses = 0  # of receivers, counted at the end of a round
        self.own_descriptors: list[str] | None = None  # beside its segments
        self._path = f"{folder}/{name}"
        open(f"{self._path}.stderr", "w").close()
        self._folder = folder
        self._peer = Peer(endpoint, kind=Kind("uvloop" if uvloop else "asyncio", "plain"), first=first)
        self.pid = self._peer.pid
        self._gone = asyncio.get_running_loop().create_future()
        self._stops = 0
        self._log_offset = 0
        self.logged: list[str] = []  # when it was last asked
        self.is_closed = False

    async def begin(self) -> None:
        """Give it its files."""
        await self.call(here.begin, self._folder, self.name)

    async def call(
        self, work: Callable[Concatenate[State, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a coroutine function there, and return its result.

        Raises:
            GoneError: it was killed.
            RoundError: it hangs, or died by itself.
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
        """Return the error that says how it ended."""
        if self.is_killed:
            return GoneError(self.name)
        status = await self._peer.ended()
        return RoundError(f"{self.name} died by itself, status {status}\n{self.complaints}")

    async def _say_where(self) -> None:
        """Have it say on its standard error where it is: its tasks, or its threads if its loop is stuck."""
        os.kill(self.pid, signal.SIGUSR1)
        await asyncio.wait([self._peer.start(here.say_where)], timeout=5)

    def kill(self) -> float:
        """Kill it, and return when."""
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
        """Return what it did since its journal was last begun."""
        return journal.read(f"{self._path}.journal")

    @property
    def complaints(self) -> str:
        """Return what it said on its standard error."""
        with open(f"{self._path}.stderr") as file:
            return file.read()

    def new_log(self) -> list[str]:
        """Return the lines that it logged since this was last asked."""
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
        """Let it end as programs do."""
        return await asyncio.wait_for(self._peer.finish(), WATCHDOG_S)

    async def close(self) -> None:
        """Forget it, and end it if it lives; closing again does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        await self._peer.close()
        for kind in ("journal", "stderr", "log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}.{kind}")


class SendersPart(Protocol):
    """What a process can be told to do that sends, or asks."""

    async def open_sender(self, state: State, plan: SenderPlan) -> str: ...
    async def reopen(self, state: State, plan: SenderPlan) -> str: ...
    async def begin_round(self, state: State) -> None: ...
    async def send_all(self, state: State, plan: SenderPlan, part: int, *, pauses: bool) -> None: ...
    async def told(self, state: State) -> int: ...


class ReceiversPart(Protocol):
    """What a process can be told to do that receives, or answers."""

    async def open_receiver(self, state: State, plan: TakerPlan) -> None: ...
    async def take(self, state: State, plan: TakerPlan, firsts: Mapping[str, int]) -> None: ...
    async def heard(self, state: State, sender: str) -> int | None: ...
    async def stop(self, state: State) -> None: ...
    async def close(self, state: State) -> None: ...


class Family:
    """A receiver and its senders; those that are killed are replaced.

    Args:
        name: which of `FAMILIES`.
    """

    sending: SendersPart = sending
    taking: ReceiversPart = taking

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_queue = FAMILIES[name] == "queue"
        self.receiver: Member
        self.senders: list[Member] = []
        self.notes: list[str] = []  # what cannot be tried here
        self.dropped: set[tuple[str, int]] = set()  # discarded by the receiver, perhaps before they were sent
        self.has_ended = True  # its receiver is gone, and it does not get another
        self._begun = 0
        self._living: list[Member] = []  # and some that were closed
        self._files = tempfile.mkdtemp(prefix="chaos-")
        self._meeting = tempfile.mkdtemp(prefix="aiotensor-")
        self._endpoint: Endpoint = f"unix://{self._meeting}/s"

    @property
    def elder(self) -> Member | None:
        """Return who lives for the whole run."""
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
        """Return everybody, with what the faults of a round call them."""
        return [(None, self.receiver), *enumerate(self.senders)]

    def left_in_folder(self) -> list[str]:
        """List what is in the folder where they meet, beside the socket."""
        return [name for name in os.listdir(self._meeting) if name != "s" or self.is_queue]

    async def new_receiver(self, plan: Round) -> Member:
        """Begin a process for a receiver, which is not opened yet."""
        return await self._new("receiver", uvloop=plan.taker.uvloop)

    async def new_sender(self, plan: Round, slot: int) -> Member:
        """Begin a process with a sender."""
        sender = plan.senders[slot]
        member = await self._new(f"sender-{slot}", uvloop=sender.uvloop)
        member.id = await member.call(self.sending.open_sender, sender)
        return member

    async def prepare(self, plan: Round) -> None:
        """Have everybody here, and connected."""
        if self.has_ended:
            wrong = await self.finish()
            if wrong:
                raise RoundError("\n".join(wrong))
            await self._begin(plan)

    async def probe(self, sender: Member, plan: SenderPlan) -> None:
        """See that a tensor of a sender arrives, and which number is next."""
        for _ in range(_PROBES):
            handle = await sender.call(sending.probe, plan)
            sender.id, sender.first = handle.sender, handle.message + 1
            if await self.receiver.call(taking.take_probe, handle):
                return
        raise RoundError(f"{sender.name}: {_PROBES} tensors did not arrive as they were")

    async def finish(self) -> list[str]:
        """Let everybody end, and return what is wrong with how they do."""
        wrong = []
        members, self.senders = self.members if self.senders else [], []
        for member in members:
            if not member.is_killed:
                await self.leave(member)
        if isinstance(self._endpoint, TensorQueue):
            self._endpoint.close()
        for member in members:
            if not member.is_killed:
                status = await member.finish()
                if status != 0 or member.complaints:
                    wrong.append(f"{member.name} ended with status {status}\n{member.complaints}")
            await member.close()
        return wrong

    async def leave(self, member: Member) -> None:
        """Have a process close what it does not close by itself when it ends."""

    @property
    def has_aborted(self) -> bool:
        """Say whether ZeroMQ has ended a process, as it is known to do."""
        return any(_ABORTED in member.complaints for member in self._living if not member.is_closed)

    async def abandon(self) -> None:
        """End everybody in the middle of a round; the next one begins with others."""
        for member in self._living:
            await member.close()
        self.senders, self.has_ended = [], True

    async def close(self) -> None:
        """End everybody, and leave nothing behind."""
        await self.abandon()
        for folder in (self._files, self._meeting):
            shutil.rmtree(folder)

    async def _begin(self, plan: Round) -> None:
        if self.is_queue:
            self._endpoint = TensorQueue()
        self.receiver, *self.senders = await asyncio.gather(
            self.new_receiver(plan), *(self.new_sender(plan, slot) for slot in range(SLOTS))
        )
        self.dropped.clear()
        await self.receiver.call(self.taking.open_receiver, plan.taker)
        for slot, sender in enumerate(self.senders):
            await self.probe(sender, plan.senders[slot])
        self.has_ended = False

    async def _new(self, role: str, *, uvloop: bool, first: Callable[[], None] | None = None) -> Member:
        self._begun += 1
        name = f"{self.name}-{role}-{self._begun}"
        member = Member(self._endpoint, self._files, name, uvloop=uvloop, first=first)
        self._living = [*(one for one in self._living if not one.is_closed), member]
        await member.begin()
        return member
