"""A long load, during which no resource may grow."""
