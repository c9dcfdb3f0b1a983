"""Adapters for vLLM: tensors of requests, and broadcasts to workers."""
