"""Checks of a ``tcp://`` address: its host, the process that listens there, the keys, and the network.

Each check has a time limit. Names are resolved in a thread that does not delay the exit of the process.
"""

import asyncio
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import zmq

from aiotensor.cli.doctor.finding import Finding, Status, read
from aiotensor.cli.keys import HOW_TO_GIVE, Keys
from aiotensor.cli.words import in_words, printable
from aiotensor.errors import AccessDeniedError, AioTensorError, PeerLostError
from aiotensor.inspection import Inspection, inspect
from aiotensor.protocol.moves import WINDOW_BYTES
from aiotensor.transports.zeromq.addresses import Address, parse
from aiotensor.transports.zeromq.resolving import look_up

__all__ = ["Place", "buffers", "examine", "packets"]

_LOOKUP_S = 5.0
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_LEAST_MTU = 1500  # of Ethernet
_SIOCGIFADDR = 0x8915
_INTERFACE = struct.Struct("16s24x")  # struct ifreq
_UNREACHED = "Check the address, and the routes and firewalls between this machine and that one"
_START = "Start the receiver or publisher"
_BINDING = {
    errno.EACCES: "Choose a port of at least 1024, or lower net.ipv4.ip_unprivileged_port_start",
    errno.EADDRINUSE: "Choose another port: a process is bound to this one, but does not listen",
}


class Place(NamedTuple):
    """A numeric address and port, as the `socket` module accepts them."""

    family: int
    address: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.address[0]}"


async def examine(text: str, keys: Keys) -> dict[str, Finding]:
    """Return the findings about an address, by the names of the checks.

    Without the keys that the address needs, or if no process listens there, the check of the handshake is
    omitted. Takes less than 20 seconds.

    Args:
        text: the address.
        keys: the keys for it.

    Raises:
        ValueError: the address is invalid.
    """
    address = parse(text, has_keys=True, is_client=True)
    has_keys = keys.secret_key is not None
    findings = {"address": _reach(address, has_keys=has_keys)}
    if keys.secret_key is not None:
        findings["keys"] = _public_key(keys.secret_key)
    findings["host"], places = await _host(address)
    if places:
        findings["listener"], reached = await _listener(places)
        if reached is not None and (address.is_local or has_keys):
            findings["handshake"] = await _handshake(text, keys)
        findings["packets"] = packets(reached or places[0])
    findings["TCP buffers"] = buffers()
    return findings


def _reach(address: Address, *, has_keys: bool) -> Finding:
    """Check that keys were given if other machines can reach an address."""
    where = f"{address.host} port {address.port}"
    if address.is_local:
        return Finding(Status.OK, f"{where}, which only this machine can reach: keys are optional")
    if has_keys:
        return Finding(Status.OK, f"{where}, with keys")
    return Finding(
        Status.PROBLEM,
        f"{where}, which other machines can reach: only 127.0.0.1, ::1 and localhost work without keys",
        HOW_TO_GIVE,
    )


def _public_key(secret_key: str) -> Finding:
    """Report the public key of this side, which the other side must list in its `client_keys`."""
    public = zmq.curve_public(secret_key.encode()).decode()
    return Finding(Status.OK, f"the public key of this side, for client_keys of the other, is {public}")


async def _host(address: Address) -> tuple[Finding, Sequence[Place]]:
    """Resolve the host of an address, and return its places in the order in which they are tried."""
    is_name = not address.targets
    try:
        async with asyncio.timeout(_LOOKUP_S):
            targets = await look_up(address.host, address.port) if is_name else address.targets
        places = [_place(str(urlsplit(str(target.address)).hostname), address.port) for target in targets]
    except TimeoutError:
        reason = f"no name server has answered for {_LOOKUP_S:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        numbers = ", ".join(map(str, places))
        return Finding(
            Status.OK, numbers if numbers == address.host else f"{address.host} resolves to {numbers}"
        ), places
    advice = "Check the name, /etc/hosts and /etc/resolv.conf, or write the numeric address"
    return Finding(Status.PROBLEM, f"{address.host} cannot be resolved: {reason}", advice), ()


def _place(number: str, port: int) -> Place:
    """Return the place of a numeric address, without querying a name server."""
    [(family, _, _, _, address), *_] = socket.getaddrinfo(
        number, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    return Place(family, address)


async def _listener(places: Sequence[Place]) -> tuple[Finding, Place | None]:
    """Check whether a process accepts connections, and return the first place where one does."""
    failures = dict(zip(places, await asyncio.gather(*map(_failure_of, places)), strict=True))
    reached = [place for place in places if failures[place] is None]
    failed = {place: failure for place, failure in failures.items() if failure is not None}
    reasons = "; ".join(f"{place}: {_reason(failure)}" for place, failure in failed.items())
    if reached:
        found = f"a process accepts connections at {', '.join(map(str, reached))}"
        return Finding(Status.OK, f"{found} ({reasons})" if reasons else found), reached[0]
    if not all(isinstance(failure, ConnectionRefusedError) for failure in failed.values()):
        return Finding(Status.PROBLEM, f"no connection is accepted: {reasons}", _UNREACHED), None
    ours = [place for place in places if _is_ours(place)]
    if ours:
        return _free(ours), None
    return Finding(
        Status.PROBLEM,
        f"nothing listens there: {reasons}",
        f"{_START}; if it runs, a firewall rejects connections to it",
    ), None


async def _failure_of(place: Place) -> OSError | None:
    """Connect to a place and disconnect; return the error if that fails."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            with socket.socket(place.family, socket.SOCK_STREAM) as sock:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, place.address)
    except OSError as error:
        return error
    return None


def _reason(error: OSError) -> str:
    # The text of asyncio's errors repeats the address, and a `TimeoutError` of asyncio has no errno.
    return os.strerror(error.errno) if error.errno else f"no answer for {_CONNECT_S:g} s"


def _is_ours(place: Place) -> bool:
    """Return whether a place is on this machine."""
    try:
        with socket.socket(place.family, socket.SOCK_DGRAM) as sock:
            sock.bind((place.address[0], 0, *place.address[2:]))
    except OSError:
        return False
    return True


def _free(places: Sequence[Place]) -> Finding:
    """Report whether a process could listen at a place on this machine, where no process does."""
    reasons = []
    advice = "Choose another address or port"
    for place in places:
        try:
            with socket.socket(place.family, socket.SOCK_STREAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
                sock.bind(place.address)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
            advice = _BINDING.get(error.errno or 0, advice)
        else:
            found = f"nothing listens there yet, but a process can listen at {place}"
            return Finding(Status.PROBLEM, found, _START)
    return Finding(Status.PROBLEM, f"no process of this user can listen there: {'; '.join(reasons)}", advice)


async def _handshake(address: str, keys: Keys) -> Finding:
    """Inspect the receiver or publisher at an address, to check that it accepts the keys."""
    try:
        seen = await inspect(address, patience_s=_ANSWER_S, **keys._asdict())
    except AccessDeniedError:
        if keys.secret_key is None:
            return Finding(Status.PROBLEM, "the process that listens there requires keys", HOW_TO_GIVE)
        return Finding(
            Status.PROBLEM,
            "the keys of this process and of the one that listens there do not match",
            "Compare --server-key with the public key of the receiver or publisher, and add the public key "
            "of this side to its client_keys",
        )
    except PeerLostError:
        keys_there = "uses keys" if keys.secret_key is None else "uses no keys"
        return Finding(
            Status.PROBLEM,
            f"the process that listens there has not answered for {_ANSWER_S:g} s",
            f"Check whether it {keys_there}, whether it was stopped, and whether it is an aiotensor process",
        )
    except AioTensorError as error:
        advice = "Check the port, and use the same version of aiotensor on both sides"
        return Finding(Status.PROBLEM, printable(str(error)), advice)
    except OSError as error:
        return Finding(Status.NOTE, f"the inspection failed: {error.strerror}", "Try again")
    kind = "receiver" if isinstance(seen, Inspection) else "publisher"
    accepted = "" if keys.secret_key is None else ", and accepts the keys"
    return Finding(Status.OK, f"a {kind} (pid {seen.pid}) answers{accepted}")


def packets(place: Place, root: Path = Path("/")) -> Finding:
    """Check the largest packet (MTU) of the network interface through which a place is reached."""
    try:
        with socket.socket(place.family, socket.SOCK_DGRAM) as sock:
            sock.connect(place.address)  # sends nothing
            local = sock.getsockname()[0]
    except OSError as error:
        return Finding(Status.NOTE, f"no route to {place}: {error.strerror}", _UNREACHED)
    # Packets to an address of this machine pass through the loopback interface.
    name = "lo" if _is_ours(place) else _interface_of(place.family, local, root)
    mtu = read(root / "sys/class/net" / name / "mtu").strip() if name else ""
    if not mtu.isdecimal():
        return Finding(
            Status.NOTE, f"the interface of {local} is unknown", f"Look it up: ip route get {place}"
        )
    found = f"at most {mtu} bytes (MTU) through {name}"
    if int(mtu) >= _LEAST_MTU:
        return Finding(Status.OK, found)
    return Finding(
        Status.NOTE,
        f"{found}, fewer than the {_LEAST_MTU} of Ethernet: tensors need more packets and processor time",
        f"Raise it (ip link set {name} mtu {_LEAST_MTU}) if each network on the way carries such packets; "
        "a tunnel or an overlay network of containers may not",
    )


def _interface_of(family: int, local: str, root: Path) -> str | None:
    """Return the name of the interface that has an address; None if it is not known."""
    if family == socket.AF_INET6:
        number = socket.inet_pton(family, local.partition("%")[0]).hex()
        lines = (line.split() for line in read(root / "proc/net/if_inet6").splitlines())
        return next((fields[-1] for fields in lines if fields[:1] == [number]), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, _INTERFACE.pack(name.encode()))
            except OSError:  # it has no address
                continue
            if answer[20:24] == socket.inet_aton(local):
                return name
    return None


def buffers(root: Path = Path("/")) -> Finding:
    """Compare the largest TCP buffers that the kernel allows with the bytes that a sender has in transit."""
    folder = root / "proc/sys/net"
    words = {name: read(folder / name).split() for name in ("ipv4/tcp_rmem", "ipv4/tcp_wmem")}
    most = {
        f"net.{name.replace('/', '.')}": int(values[2]) for name, values in words.items() if len(values) == 3
    }
    if len(most) < len(words):
        return Finding(Status.NOTE, "net.ipv4.tcp_rmem and tcp_wmem cannot be read", "Mount /proc")
    found = ", ".join(f"{name} up to {in_words(limit)}" for name, limit in most.items())
    for name in ("core/rmem_max", "core/wmem_max"):
        if limit := read(folder / name).strip():  # the kernel hides them in containers
            found += f", net.{name.replace('/', '.')} {in_words(int(limit))}"
    small = [name for name, limit in most.items() if limit < WINDOW_BYTES]
    if not small:
        return Finding(Status.OK, found)
    settings = " and ".join(
        f'sysctl -w {name}="{" ".join([*words[_file(name)][:2], str(WINDOW_BYTES)])}"' for name in small
    )
    return Finding(
        Status.NOTE,
        f"{found}: less than the {in_words(WINDOW_BYTES)} that a sender keeps in transit, so a fast or "
        "distant network cannot be used fully",
        f"Raise the third value: {settings}",
    )


def _file(name: str) -> str:
    return name.removeprefix("net.").replace(".", "/", 1)
