"""The implementation behind `TensorReceiver`."""
