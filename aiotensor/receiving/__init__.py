"""The implementation of `TensorReceiver`."""
