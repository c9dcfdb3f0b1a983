"""The queue that a parent creates for its children: a random name at which a receiver listens."""

import secrets

__all__ = ["TensorQueue"]


class TensorQueue:
    """An address without a path, for the processes to which it is passed.

    Create the queue in one process, and pass it to others: as an argument of `multiprocessing` processes that
    are started by ``spawn`` or ``forkserver``, or in any other way that pickles it. Then open one
    `TensorReceiver` or `Publisher` on it, and any number of `TensorSender`s or `Subscriber`s, each in any of
    these processes and in any order. A queue is only a name, so it uses no descriptors and leaves nothing in
    the file system.

    Only processes of this user and in this network namespace can connect; a container has its own by default.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or secrets.token_hex(16)

    def __repr__(self) -> str:
        return f"<TensorQueue {self._name}>"

    @property
    def socket_name(self) -> str:
        """The abstract address of the receiver's socket, which ends with that socket.

        Only the library uses this.
        """
        return f"\0aiotensor-{self._name}"
