"""The rules of the protocols as plain objects, which perform no I/O, never wait and contain no tensors."""
