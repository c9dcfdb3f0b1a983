"""Sockets of ZeroMQ on the event loop, and the connections between machines that they make."""
