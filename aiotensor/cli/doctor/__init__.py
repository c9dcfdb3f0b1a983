"""`aiotensor doctor`: what this machine allows, and what to do about what it does not.

    command.py     the options, and the exit status
    examine.py     every check, in the order in which they are shown
    kernel.py      needed: Linux, memfds and Unix sockets, each really tried
    memory.py      room for the shared memory: cgroups, what is free, limits of the process
    folder.py      where a Unix socket is to be: its folder, its path, what is there already
    software.py    Python's start method, torch, CUDA, uvloop
    report.py      lines and JSON; table.py draws on a terminal

A check is a function that returns one `Finding`. None of them uses the rest of the library but `cgroups`, nor
anything but torch that must be installed.
"""
