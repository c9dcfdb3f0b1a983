"""Validate the limits and the heartbeats of clients and servers."""

from collections.abc import Collection

import zmq

from aiotensor.protocol.exchange import MAX_HEADER_BYTES
from aiotensor.protocol.parts import PartLimits
from aiotensor.runtime.arguments import count
from aiotensor.transports.zeromq.addresses import Address
from aiotensor.types import MAX_NUMBER

__all__ = ["limits", "part_limits"]

# The defaults for other machines, where only missing replies show that the peer is gone: a loss is noticed
# within 1 s, or 1.5 s if only the packets to the peer are lost.
_HEARTBEAT_INTERVAL_S, _HEARTBEAT_TIMEOUT_S = 0.25, 0.65


def limits(
    addresses: Collection[Address],
    high_water_mark: int,
    largest: int | None,
    heartbeat_interval_s: float | None,
    heartbeat_timeout_s: float | None,
) -> dict[int, int | bytes]:
    """Return the socket options that limit queues and message sizes, and set the heartbeats.

    Args:
        addresses: the addresses at which the socket listens, or to which it connects.
        high_water_mark: the maximum number of queued messages in each direction.
        largest: the maximum size of a part of a message in bytes, from `part_limits`; None for no limit.
        heartbeat_interval_s: the time between heartbeats in seconds; None for the default.
        heartbeat_timeout_s: the time in seconds without a reply to a heartbeat after which the peer is lost;
            None for the default.

    Raises:
        ValueError: a limit is not positive.
    """
    high_water_mark = count("high_water_mark", high_water_mark, most=2**31 - 1)
    options: dict[int, int | bytes] = {
        zmq.SNDHWM: high_water_mark,
        zmq.RCVHWM: high_water_mark,
        # Peers only know the limit on parts, and a header may be longer than that.
        zmq.MAXMSGSIZE: -1 if largest is None else min(largest + MAX_HEADER_BYTES, MAX_NUMBER),
    }
    is_local = all(address.is_local for address in addresses)
    if is_local and heartbeat_interval_s is None and heartbeat_timeout_s is None:
        return options
    # ZeroMQ stops reading a connection whose queue is full. If the connection ends then, the next heartbeat
    # fails an assertion of libzmq 4.3.5, which ends the process. Credit bounds what honest peers send.
    options[zmq.RCVHWM] = 0
    options[zmq.HEARTBEAT_IVL] = _milliseconds(
        "heartbeat_interval_s", heartbeat_interval_s, _HEARTBEAT_INTERVAL_S
    )
    options[zmq.HEARTBEAT_TIMEOUT] = _milliseconds(
        "heartbeat_timeout_s", heartbeat_timeout_s, _HEARTBEAT_TIMEOUT_S
    )
    return options


def part_limits(max_part_bytes: int | None, max_body_bytes: int | None) -> PartLimits:
    """Check the limits on the parts of messages and on their bodies, and return them as sent in hellos.

    Raises:
        ValueError: a limit is not positive.
    """
    named = {"max_part_bytes": max_part_bytes, "max_body_bytes": max_body_bytes}
    return PartLimits(*(None if limit is None else count(name, limit) for name, limit in named.items()))


def _milliseconds(name: str, value: float | None, default: float) -> int:
    span = default if value is None else value
    if not 0.001 <= span <= 6553:  # ZeroMQ sends it to the other side in 16 bits, as tenths of a second
        raise ValueError(f"{name} must be between 0.001 and 6553 seconds, got {span}")
    return round(span * 1000)
