"""Adapters for web frameworks and monitoring systems. Each module is imported by name."""
