"""The options of connections between machines: keys, and the time to detect a host that is gone."""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import zmq
from zmq.utils import z85

from aiotensor.protocol.network import OPENING, STEP_BYTES
from aiotensor.transports.address import TcpAddress, TcpArguments, tcp_address
from aiotensor.types import CurveKey

__all__ = ["TcpOptions", "curve_options", "options_of"]

# More than the header of a step and the 33 bytes of encryption (https://rfc.zeromq.org/spec/26/) together.
_OVERHEAD_BYTES = 256
_PEER_TIMEOUT_S = 2.0  # by default, between machines
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.1, 3600.0

# A lost host is detected within the timeout plus this interval; the documentation promises the timeout plus a
# second. The rest of that second is a margin for busy processes. It need not grow with the timeout.
_HEARTBEAT_INTERVAL_S = 0.5

_KEY_BYTES = 32


class TcpOptions(NamedTuple):
    """How one side uses an address.

    Attributes:
        address: the address.
        socket: the options of its sockets.
        allowed: at the side that listens, the public keys of its peers; empty if they need no keys.
        opening: the first message of either side.
        loss_reason: the text of errors about a lost connection.
    """

    address: TcpAddress
    socket: Mapping[int, int | bytes]
    allowed: frozenset[bytes]
    opening: bytes
    loss_reason: str


def options_of(endpoint: str, given: TcpArguments) -> TcpOptions:
    """Return the options of a ``tcp://`` address.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the address or an argument is invalid, or other machines can reach the address and there
            are no keys.
    """
    keys, allowed = curve_options(given)
    address = tcp_address(endpoint, has_keys=bool(keys or given.token), connects=given.connects)
    if not (address.port or given.token or given.finds_port):
        raise ValueError(f"the address {endpoint!r} does not contain a port that others could connect to")
    options: dict[int, int | bytes] = {
        **keys,
        # Credit limits both queues. A limit of ZeroMQ would make it stop reading, and then not notice the
        # end of a connection.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: STEP_BYTES + _OVERHEAD_BYTES,
    }
    timeout_s = given.peer_timeout_s
    if timeout_s is None and not address.is_local:
        timeout_s = _PEER_TIMEOUT_S
    loss_reason = "the peer closed the connection"
    if timeout_s is not None:
        if not _LEAST_TIMEOUT_S <= timeout_s <= _MOST_TIMEOUT_S:
            raise ValueError(
                f"peer_timeout_s must be between {_LEAST_TIMEOUT_S} and {_MOST_TIMEOUT_S:g} seconds, got "
                f"{timeout_s}"
            )
        options |= {
            zmq.HEARTBEAT_IVL: int(_HEARTBEAT_INTERVAL_S * 1000),
            zmq.HEARTBEAT_TIMEOUT: round(timeout_s * 1000),
            # ZeroMQ sends no heartbeat while a message waits for the network; the kernel ends the connection.
            zmq.TCP_MAXRT: round(timeout_s * 1000),
        }
        loss_reason += f", or did not answer for {timeout_s:g} s"
    return TcpOptions(address, options, allowed, OPENING + given.token.encode(), loss_reason)


def curve_options(given: TcpArguments) -> tuple[dict[int, int | bytes], frozenset[bytes]]:
    """Return the CURVE options of a socket, and the public keys of its peers if it listens.

    Raises:
        TypeError: a key is neither `str` nor `bytes`, or one key was passed in place of a collection.
        ValueError: a key is invalid, or one of the two sides has none.
    """
    if isinstance(given.client_keys, str | bytes):  # a collection of characters
        raise TypeError("client_keys must be a collection of public keys, such as [key], got one key")
    name, theirs = "client_keys", list(given.client_keys)
    if given.connects:
        name, theirs = "server_key", [] if given.server_key is None else [given.server_key]
    if given.secret_key is None and not theirs:
        return {}, frozenset()
    if given.secret_key is None or not theirs:
        raise ValueError(
            f"secret_key and {name} must be passed together: the secret key of this side, and the public "
            f"{'key' if given.connects else 'keys'} of the other"
        )
    public = [_key(name, one) for one in theirs]
    secret = _key("secret_key", given.secret_key)
    if not given.connects:
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret}, frozenset(public)
    return {
        zmq.CURVE_SECRETKEY: secret,
        zmq.CURVE_PUBLICKEY: zmq.curve_public(secret),
        zmq.CURVE_SERVERKEY: public[0],
    }, frozenset()


def _key(name: str, value: CurveKey) -> bytes:
    """Check a CURVE key."""
    if not isinstance(value, str | bytes):
        raise TypeError(
            f"{name} must contain keys of 40 characters, as returned by zmq.curve_keypair(), got {value!r}"
        )
    text = value.encode() if isinstance(value, str) else value
    try:
        is_key = len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):  # the last for digits that exceed 32 bits
        is_key = False
    if not is_key:  # the error does not show it: it may be a secret with a typo
        raise ValueError(f"{name} must contain keys of 40 characters, as returned by zmq.curve_keypair()")
    return text
