"""The arguments for connections between machines. Importing this does not import ZeroMQ."""

from collections.abc import Collection
from typing import NamedTuple

from aiotensor.types import CurveKey

__all__ = ["TcpArguments"]


class TcpArguments(NamedTuple):
    """The arguments of the user for connections between machines.

    Attributes:
        connects: whether this side connects; otherwise it listens.
        secret_key: the secret key of this side.
        server_key: the public key of the side that listens, for a side that connects.
        client_keys: the public keys of the sides that connect, for a side that listens.
        peer_timeout_s: the seconds without an answer after which the peer is lost; None for the default.
        token: a secret that both sides have, and that replaces keys where the connection is not encrypted;
            "" for none. With a token, a side may listen at any free port.
    """

    connects: bool = True
    secret_key: CurveKey | None = None
    server_key: CurveKey | None = None
    client_keys: Collection[CurveKey] = ()
    peer_timeout_s: float | None = None
    token: str = ""

    @property
    def is_given(self) -> bool:
        """Whether the user gave any argument."""
        return any((self.secret_key, self.server_key, self.client_keys, self.peer_timeout_s))
