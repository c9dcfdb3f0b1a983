"""Transports, which carry records and descriptors between two processes."""
