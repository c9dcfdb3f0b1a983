"""Time aiotensor beside what people would use without it.

`python -m bench --help` shows the options. A contender is one file in `contenders/` and one row in
its table; a workload is one file in `workloads/` and one row in its table.
"""
