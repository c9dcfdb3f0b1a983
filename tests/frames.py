"""Frames as a sender makes them, for tests that speak for themselves."""

from aiotensor.protocol.frames import Account, Put
from aiotensor.statistics.counters import WaitCounter

NO_WAITS = WaitCounter().waits()

# Of a sender that holds nothing and has done nothing.
ACCOUNT = Account(0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NO_WAITS, NO_WAITS, 0, 0, {})


def put(**changes: object) -> Put:
    """Announce a small tensor, or something that differs from that in what is given."""
    fields: dict[str, object] = {
        "message": 0,
        "tensor": 0,
        "dtype": "uint8",
        "shape": (3,),
        "device": "cpu",
        "placement": "inline",
        "payload": b"abc",
    }
    return Put(**{**fields, **changes})  # type: ignore[arg-type]
