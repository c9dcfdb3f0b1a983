"""The rules of the conversation as plain objects: facts in, decisions out; no I/O, no waiting, no tensors."""
