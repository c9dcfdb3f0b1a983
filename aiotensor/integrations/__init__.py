"""Adapters for web frameworks, vLLM and monitoring systems. Import each module by its full name."""
