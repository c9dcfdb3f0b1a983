"""Counters, and the registry of the open objects of a process."""
