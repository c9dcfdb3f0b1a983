"""Adapters for servers and for those who watch them; each is imported by name, and needs its own extra."""
