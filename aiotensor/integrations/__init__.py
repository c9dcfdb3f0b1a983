"""Adapters for what stands around a server: web frameworks, and what watches it. Each is imported by name."""
