"""Faults while tensors travel, and an account of every tensor."""
