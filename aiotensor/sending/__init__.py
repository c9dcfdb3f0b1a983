"""The implementation behind `TensorSender`."""
