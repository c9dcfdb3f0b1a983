"""Child processes, and measurements of processes."""
