"""Time aiotensor beside what people would use without it, and hold it against the goals of its design.

`python -m bench --help` shows the options. A contender is one file in `contenders/` and one row in its
table; a workload is one file in `workloads/` and one row in its table. `goals.py` has the goals.

The way of a number: `plan.py` decides who does what; `harness.py` goes through the rounds; `group.py` starts
each contender in fresh processes, which come from `nursery.py` and run `worker.py`; `results.py` puts the
rounds together; `tables.py` and `plots.py` show them.
"""
