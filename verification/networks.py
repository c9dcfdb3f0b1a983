"""Two hosts on one machine: network namespaces with a cable between them that can be cut.

    with two_hosts() as hosts:
        server = Peer(endpoint, first=hosts.a.enter)  # a process on the first host
        ...
        hosts.cut()  # packets are lost silently, in both directions
        hosts.heal()
        hosts.slow_down(1000)  # to this many Mbit/s
        hosts.lose_some(2)  # percent of the packets, at random

Both hosts have the same users, files and processes; they differ in their network and in some files of `/etc`.
"""

import ctypes
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18

_DEVICE = "veth0"  # in each namespace, which has no other devices but its loopback
_ADDRESSES = (("10.77.0.1", "10.77.0.3"), ("10.77.0.2",))
_SILENT_DNS = "10.77.0.53"
_NOWHERE = "02:00:00:00:00:99"  # no device has it: packets to it are lost

_GROUPS = "/sys/fs/cgroup"

_FORBIDDEN = ("Operation not permitted", "Permission denied")


class NoNamespacesError(Exception):
    """Network namespaces cannot be created on this machine, for the given reason."""


@dataclass(frozen=True)
class Host:
    """One of two hosts.

    Attributes:
        namespace: its name for ``ip netns``.
        addresses: the addresses of its end of the cable.
        etc: a folder with its own versions of files of ``/etc``.
    """

    namespace: str
    addresses: tuple[str, ...]
    etc: str

    @property
    def address(self) -> str:
        """Its first address."""
        return self.addresses[0]

    @property
    def device(self) -> str:
        """The name of its end of the cable."""
        return _DEVICE

    def enter(self) -> None:
        """Move the calling process to this host, with its network and its files of ``/etc``.

        Threads that were started before stay where they are.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            _check(libc.setns(descriptor, _CLONE_NEWNET))
        finally:
            os.close(descriptor)
        _check(libc.unshare(_CLONE_NEWNS))
        _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        _show_devices(libc)
        for name in os.listdir(self.etc):
            source, place = os.fsencode(f"{self.etc}/{name}"), os.fsencode(f"/etc/{name}")
            _check(libc.mount(source, place, None, _MS_BIND, None))

    def know(self, names: Mapping[str, str]) -> None:
        """Set the addresses of names for the processes of this host.

        For any other name they ask a name server that never answers.
        """
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        # The same file as before, since a process that has entered sees that one.
        Path(self.etc, "hosts").write_text(f"127.0.0.1 localhost\n{lines}")


@dataclass(frozen=True)
class Hosts:
    """Two hosts, and the cable between them."""

    a: Host
    b: Host

    def cut(self) -> None:
        """Lose all packets, in both directions."""
        self.cut_one_way(self.a, self.b)
        self.cut_one_way(self.b, self.a)

    def cut_one_way(self, source: Host, target: Host) -> None:
        """Lose the packets from one host to the other."""
        for address in target.addresses:
            _let_neighbour_be(source, address, _NOWHERE)

    def heal(self) -> None:
        """Lose no more packets."""
        for source, target in ((self.a, self.b), (self.b, self.a)):
            for address in target.addresses:
                [link] = json.loads(_ip_in(target, "-json", "link", "show", _DEVICE))
                _let_neighbour_be(source, address, link["address"])

    def slow_down(self, mbit_s: int) -> None:
        """Limit the rate of the cable, in each direction."""
        shape = ("tbf", "rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "20ms")
        for host in (self.a, self.b):
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", _DEVICE, "root", *shape)

    def lose_some(self, percent: int) -> None:
        """Lose some of the packets at random, in both directions.

        Raises:
            NoNamespacesError: the command `nft` is missing.
        """
        if shutil.which("nft") is None:
            raise NoNamespacesError("the command `nft` of nftables is not installed")
        commands = "add table ip tests; add chain ip tests arriving { type filter hook input priority 0; }"
        commands += f"; add rule ip tests arriving iifname {_DEVICE} numgen random mod 100 < {percent} drop"
        for host in (self.a, self.b):
            _ip("netns", "exec", host.namespace, "nft", commands)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts, and remove them at the end.

    Their kernels repeat a connection attempt after 1, 3, 7 and 15 s, as Linux did before 6.5.

    Raises:
        NoNamespacesError: this user may not create network namespaces, or the command `ip` is missing.
    """
    tag = f"{os.getpid():x}{secrets.token_hex(3)}"
    if shutil.which("ip") is None:
        raise NoNamespacesError("the command `ip` of iproute2 is not installed")
    with ExitStack() as made:
        hosts = []
        for letter, addresses in zip("ab", _ADDRESSES, strict=True):
            namespace = f"aiotensor-{tag}{letter}"
            _add_namespace(namespace)
            made.callback(_ip, "netns", "del", namespace)
            etc = tempfile.mkdtemp(prefix="aiotensor-etc-")
            made.callback(shutil.rmtree, etc)
            Path(etc, "resolv.conf").write_text(f"nameserver {_SILENT_DNS}\n")
            Path(etc, "nsswitch.conf").write_text("hosts: files dns\n")
            host = Host(namespace, addresses, etc)
            host.know({})
            hosts.append(host)
        a, b = hosts
        # Created in its namespace, where it cannot be mistaken for a device of another run.
        ends = [_DEVICE, "netns", a.namespace, "type", "veth", "peer", "name", _DEVICE, "netns", b.namespace]
        _ip("link", "add", *ends)
        for host in hosts:
            for device in ("lo", _DEVICE):
                _ip_in(host, "link", "set", device, "up")
            for address in host.addresses:
                _ip_in(host, "address", "add", f"{address}/24", "dev", _DEVICE)
            _let_neighbour_be(host, _SILENT_DNS, _NOWHERE)
            linear = "/proc/sys/net/ipv4/tcp_syn_linear_timeouts"
            command = f"test ! -e {linear} || echo 0 > {linear}"
            _ip("netns", "exec", host.namespace, "sh", "-c", command)
        yield Hosts(a, b)


def _show_devices(libc: ctypes.CDLL) -> None:
    """Mount ``/sys`` with the devices of this host, which UCX lists, and with the same control groups."""
    groups = os.open(_GROUPS, os.O_PATH)
    try:
        _check(libc.mount(b"none", b"/sys", b"sysfs", 0, None))
        _check(
            libc.mount(f"/proc/self/fd/{groups}".encode(), _GROUPS.encode(), None, _MS_BIND | _MS_REC, None)
        )
    finally:
        os.close(groups)


def _add_namespace(name: str) -> None:
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        if any(text in error.stderr for text in _FORBIDDEN):
            reason = f"this user may not create network namespaces: {error.stderr.strip()}"
            raise NoNamespacesError(reason) from error
        raise


def _let_neighbour_be(host: Host, address: str, hardware_address: str) -> None:
    link = ("dev", _DEVICE, "nud", "permanent")
    _ip_in(host, "neigh", "replace", address, "lladdr", hardware_address, *link)


def _ip_in(host: Host, *words: str) -> str:
    return _ip("-n", host.namespace, *words)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
