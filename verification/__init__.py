"""Programs that verify aiotensor for a given time, and the processes, networks and loops that they share.

- `python -m verification.chaos` injects faults while tensors travel, and accounts for every tensor.
- `python -m verification.fuzz` sends valid and invalid messages to peers of each role but ranks.
- `python -m verification.soak` starts and ends processes for a long time, and checks that no resource grows.
- `python -m verification.model` compares random sequences of operations with a model.

Each takes `--seconds` and `--seed`, and ends with status 1 if it finds an error. `make test-all` runs
each but the soak for a minute.
"""
