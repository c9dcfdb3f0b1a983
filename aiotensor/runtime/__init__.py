"""The environment of every object: event loop, threads, file descriptors, processes and logs."""
