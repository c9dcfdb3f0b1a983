"""Encode and decode messages that contain tensors, as msgpack.

A message is a msgspec Struct, a dataclass, a list or a dict, nested to any depth, with tensors and numpy
arrays anywhere in it:

    encoder = TensorEncoder()
    decoder = TensorDecoder(Video)
    body, *buffers = encoder.encode(Video(fps=30.0, frames=frames))
    video = decoder.decode([body, *buffers])

Small tensors are part of the body. Large tensors become out-of-band buffers over their memory, and the
decoder creates tensors over these buffers. Like the out-of-band buffers of pickle, they avoid copies, but
nothing is pickled.

Another transport can carry the tensors. In this case, the encoder passes each tensor to the function `place`,
which returns an opaque handle, or None to encode the tensor in the message. The decoder passes each handle to
the function `find`, which returns the tensor.
"""

from aiotensor.codec.decoder import Find, TensorDecoder
from aiotensor.codec.encoder import Place, TensorEncoder
from aiotensor.codec.meta import TensorMeta

__all__ = ["Find", "Place", "TensorDecoder", "TensorEncoder", "TensorMeta"]
