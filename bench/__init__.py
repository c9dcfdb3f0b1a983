"""Compare the speed of aiotensor with its alternatives, and with the goals of its design.

`python -m bench --help` shows the options. A contender is one file in `contenders/` and one row in its
table; a workload is one file in `workloads/` and one row in its table. `goals.py` has the goals.

The modules in the order of a run: `plan.py` selects contenders and workloads; `harness.py` runs the rounds;
`group.py` starts each contender in new processes, which are forked by `fork_server.py` and run `worker.py`;
`results.py` combines the rounds; `calls.py` counts calls of functions; `tables.py`, with the columns of
`views.py`, and `plots.py` present the results, of which `pages.py` writes one part into the documents.
"""
