"""The options of connections between machines: keys, and the time to detect a host that is gone."""

from collections.abc import Mapping
from typing import NamedTuple

import zmq

from aiotensor.protocol.network import OPENING, STEP_BYTES
from aiotensor.transports.tcp.arguments import TcpArguments
from aiotensor.transports.zeromq.addresses import Address, parse
from aiotensor.transports.zeromq.keys import connecting_keys, listening_keys

__all__ = ["TcpOptions", "options_of"]

# More than the header of a step and the 33 bytes of encryption (https://rfc.zeromq.org/spec/26/) together.
_OVERHEAD_BYTES = 256
_PEER_TIMEOUT_S = 2.0  # by default, between machines
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.1, 3600.0

# A lost host is detected within the timeout plus this interval; the documentation promises the timeout plus a
# second. The rest of that second is a margin for busy processes. It need not grow with the timeout.
_HEARTBEAT_INTERVAL_S = 0.5


class TcpOptions(NamedTuple):
    """How one side uses an address.

    Attributes:
        address: the address.
        socket: the options of its sockets.
        allowed: at the side that listens, the public keys of its peers; empty if they need no keys.
        opening: the first message of either side.
        loss_reason: the text of errors about a lost connection.
    """

    address: Address
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
    allowed: frozenset[bytes] = frozenset()
    if given.connects:
        keys = connecting_keys(given.secret_key, given.server_key)
    else:
        keys, allowed = listening_keys(given.secret_key, given.client_keys)
    has_keys = bool(keys or given.token)
    address = parse(endpoint, has_keys=has_keys, is_client=given.connects, local_scheme="unix")
    if not (address.port or given.token):
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
