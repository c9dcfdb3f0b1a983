"""The bytes of tensors: where they are placed, how they are copied, and how they are viewed."""
