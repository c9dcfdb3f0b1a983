"""ZeroMQ sockets on the event loop, for the channel and for connections between machines."""
