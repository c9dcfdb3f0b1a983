"""The processes of one endpoint: the run starts, stops, continues, kills and calls them."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import zmq

from aiotensor import AioTensorError
from verification.chaos import here, journal, sending, taking
from verification.chaos.plan import FAMILIES, PEER_TIMEOUT_S, ROLES, SLOTS, Round
from verification.loops import Kind
from verification.places import free_port
from verification.processes.peers import Peer, State

P = ParamSpec("P")
R = TypeVar("R")

WATCHDOG_S = 15.0  # far longer than any call takes, even on a busy machine; a slower call hangs
_PROBES_S = 5 * PEER_TIMEOUT_S  # far longer than until both sides have noticed a loss


class RoundError(Exception):
    """A round went wrong."""


class GoneError(Exception):
    """The called process was killed before it returned a result."""


class Member:
    """One process.

    Args:
        address: the address of its objects.
        slot: its target in the faults of a round.
        path: the path of its files, without their suffixes.
        uvloop: whether it runs on uvloop.
    """

    def __init__(self, address: str, slot: int, path: str, *, uvloop: bool) -> None:
        self.name = os.path.basename(path)
        self.slot = slot
        self.is_new = False  # started during the round
        self.is_killed = False
        self.continued_at = 0.0  # when it was last continued
        self.id = ""  # of its sender
        self.losses = 0  # of receivers, counted at the end of a round
        self.own_descriptors: list[str] | None = None  # besides those of segments, and pipes
        self.own_pipes: int | None = None
        self.has_confirmed_descriptors = False  # in a second round
        self.paused_s = 0.0  # the longest pause in this round or at the end of the one before, if measured
        self._last_pause_s = 0.0
        self._path = path
        open(f"{self._path}.stderr", "w").close()
        self._peer = Peer(address, kind=Kind("uvloop" if uvloop else "asyncio", "plain"))
        self.pid = self._peer.pid
        self._gone = asyncio.get_running_loop().create_future()
        self._stops = 0
        self._log_offset = 0
        self.logged: list[str] = []  # the lines of the last `new_log`
        self.is_closed = False

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


class Family:
    """Senders and a receiver; killed ones are replaced. The other kinds of work derive their own classes.

    Args:
        name: one of the names in `FAMILIES`.
    """

    sending: Any = sending  # the modules with the operations of both sides
    taking: Any = taking
    listeners = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.work, self.is_remote = FAMILIES[name]
        self.senders: list[Member] = []  # or clients, or the publisher
        self.takers: list[Member] = []  # the receiver, or the servers, or the subscribers
        self._begun = 0
        self._living: list[Member] = []  # includes some closed ones
        self._files = tempfile.mkdtemp(prefix="chaos-")
        self._meeting = tempfile.mkdtemp(prefix="aiotensor-")
        self._sockets = [f"s{number}" for number in range(self.listeners)]
        self._addresses = [f"unix://{self._meeting}/{name}" for name in self._sockets]
        listening: dict[str, Any] = {}
        connecting: dict[str, Any] = {}
        if self.is_remote:
            self._addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in self._sockets]
            (server_public, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
            listening = {"secret_key": server_secret, "client_keys": [public]}
            connecting = {"secret_key": secret, "server_key": server_public}
            for arguments in (listening, connecting):
                arguments["peer_timeout_s"] = PEER_TIMEOUT_S
        sides = (listening, connecting) if self.work == "broadcast" else (connecting, listening)
        self._arguments = dict(zip(ROLES[self.work], sides, strict=True))

    @property
    def receiver(self) -> Member:
        """Return the first receiver, server or subscriber."""
        return self.takers[0]

    @property
    def members(self) -> list[Member]:
        """Return all processes."""
        return [*self.takers, *self.senders]

    def at(self, slot: int) -> Member:
        """Return the process that is the target of faults."""
        return self.takers[slot - SLOTS] if slot >= SLOTS else self.senders[slot]

    def left_in_folder(self) -> list[str]:
        """List the files in the shared folder, except the sockets."""
        return [name for name in os.listdir(self._meeting) if name not in self._sockets]

    async def new_sender(self, plan: Round, slot: int, *, opens: bool = True) -> Member:
        """Start a process for a sender, a client or a publisher, and open it unless the round does."""
        sender = plan.senders[slot]
        member = await self._new(ROLES[self.work][0], slot, uvloop=sender.uvloop)
        if opens:
            member.id = await member.call(self.sending.open_sender, sender)
        return member

    async def new_taker(self, plan: Round, number: int) -> Member:
        """Start a process for a receiver, a server or a subscriber, without opening it."""
        return await self._new(ROLES[self.work][1], number, uvloop=plan.takers[number].uvloop)

    async def prepare(self, plan: Round) -> None:
        """Start and connect all processes before the first round."""
        if self.senders:
            return
        takers = range(len(plan.takers))
        self.takers = await asyncio.gather(*(self.new_taker(plan, number) for number in takers))
        for taker, one in zip(self.takers, plan.takers, strict=True):
            await taker.call(self.taking.open_receiver, one)
        slots = range(len(plan.senders))
        self.senders = await asyncio.gather(*(self.new_sender(plan, slot) for slot in slots))
        for slot in slots:
            await self.probe(slot)

    async def probe(self, slot: int) -> None:
        """Check that a tensor of a sender arrives, and store the id of the sender."""
        sender = self.senders[slot]
        ends = time.monotonic() + _PROBES_S
        while True:
            handle = await sender.call(sending.probe)
            sender.id = handle.sender
            if await self.receiver.call(taking.take_probe, handle):
                sender.losses = await sender.call(sending.losses)
                return
            if time.monotonic() > ends:
                raise RoundError(f"{sender.name}: the tensors of {_PROBES_S} s did not arrive")
            await asyncio.sleep(0.001)

    async def finish(self) -> list[str]:
        """End all processes, and return the problems with their exits."""
        wrong = []
        members = [member for member in self.members if not member.is_killed]
        self.senders, self.takers = [], []
        for member in members:
            await self.leave(member)
        for member in members:
            status = await member.finish()
            if status != 0 or member.complaints:
                wrong.append(f"{member.name} ended with status {status}\n{member.complaints}")
        return wrong

    async def leave(self, member: Member) -> None:
        """Close the objects of a process that it does not close on exit."""

    async def close(self) -> None:
        """End all processes, and remove their files."""
        for member in self._living:
            await member.close()
        for folder in (self._files, self._meeting):
            shutil.rmtree(folder)

    async def _new(self, role: str, number: int, *, uvloop: bool) -> Member:
        self._begun += 1
        path = f"{self._files}/{self.name}-{role}-{number}-{self._begun}"
        slot = number + SLOTS * (role == ROLES[self.work][1])
        member = Member(self._addresses[0], slot, path, uvloop=uvloop)
        self._living = [*(one for one in self._living if not one.is_closed), member]
        await member.call(here.begin, path, self._arguments[role], self._addresses)
        return member
