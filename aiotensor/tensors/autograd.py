"""What a tensor is to autograd: whether a gradient is wanted for it, and whether it is a parameter."""

import torch
from torch.nn import Parameter

from aiotensor.errors import ProtocolError

__all__ = ["as_leaf"]


def as_leaf(tensor: torch.Tensor, *, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a tensor that arrived as what it was on the other side.

    Raises:
        ProtocolError: a tensor of this dtype cannot require a gradient.
    """
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ProtocolError(f"the peer sent a tensor of {tensor.dtype} that requires a gradient")
    if is_parameter:
        return Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
