"""CURVE keys: both sides prove that they have a secret key, and know the public key of the other."""

import struct
from collections.abc import Collection

import zmq
from zmq.utils import z85

from aiotensor.types import CurveKey

__all__ = ["connecting_keys", "listening_keys"]

_KEY_BYTES = 32


def connecting_keys(secret_key: CurveKey | None, server_key: CurveKey | None) -> dict[int, int | bytes]:
    """Return the CURVE options of a socket that connects; none if it has no keys.

    Raises:
        TypeError: a key is neither `str` nor `bytes`.
        ValueError: a key is invalid, or one of the two is missing.
    """
    if secret_key is None and server_key is None:
        return {}
    if secret_key is None or server_key is None:
        raise ValueError(
            "secret_key and server_key must be passed together: the secret key of this side, and the public "
            "key of the other"
        )
    secret = _key("secret_key", secret_key)
    return {
        zmq.CURVE_SECRETKEY: secret,
        zmq.CURVE_PUBLICKEY: zmq.curve_public(secret),
        zmq.CURVE_SERVERKEY: _key("server_key", server_key),
    }


def listening_keys(
    secret_key: CurveKey | None, clients: Collection[CurveKey]
) -> tuple[dict[int, int | bytes], frozenset[bytes]]:
    """Return the CURVE options of a socket that listens, and the public keys of its peers.

    Raises:
        TypeError: a key is neither `str` nor `bytes`, or one key was passed in place of a collection.
        ValueError: a key is invalid, or one of the two is missing.
    """
    if isinstance(clients, str | bytes):  # a collection of characters
        raise TypeError("client_keys must be a collection of public keys, such as [key], got one key")
    if secret_key is None and not clients:
        return {}, frozenset()
    if secret_key is None or not clients:
        raise ValueError(
            "secret_key and client_keys must be passed together: the secret key of this side, and the public "
            "keys of the clients"
        )
    public = frozenset(_key("client_keys", client) for client in clients)
    return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: _key("secret_key", secret_key)}, public


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
