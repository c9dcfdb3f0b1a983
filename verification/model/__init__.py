"""Random sequences of operations, compared with a model."""
