"""The addresses that subcommands accept."""

__all__ = ["FORMS", "refuse_message_server"]

FORMS = "unix:///PATH|engine:///PATH|tcp://HOST:PORT"


def refuse_message_server(address: str) -> None:
    """Check that an address is not that of a `MessageServer` only.

    Raises:
        ValueError: it is.
    """
    if address.lower().startswith("ipc:"):
        raise ValueError(
            f"{address} is the address of a MessageServer, which cannot be inspected. Pass the address of a "
            "TensorReceiver or a Publisher; the Prometheus metrics of a process include its MessageServers."
        )
