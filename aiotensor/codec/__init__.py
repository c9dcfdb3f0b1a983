"""Messages with tensors inside, as msgpack.

A message is any msgspec Struct, dataclass, list or dict, nested to any depth, with tensors and numpy arrays
anywhere in it:

    encoder = TensorEncoder()
    decoder = TensorDecoder(Video)
    body, *buffers = encoder.encode(Video(fps=30.0, frames=frames))
    video = decoder.decode([body, *buffers])

Small tensors are part of the body. Large ones become out-of-band buffers over the memory of the tensors, and
the decoder makes tensors over these buffers. So nothing is copied, as with the out-of-band buffers of pickle,
and nothing is pickled either.

Another transport can carry the tensors: the encoder passes each tensor to a function `place`, which returns
an opaque handle, or None for a tensor that it does not carry. The decoder passes each handle to a function
`find`.
"""

from aiotensor.codec.decoder import Find, TensorDecoder
from aiotensor.codec.encoder import Place, SourceEncoder, TensorEncoder
from aiotensor.codec.meta import TensorMeta
from aiotensor.codec.wire import PACKED

__all__ = ["PACKED", "Find", "Place", "SourceEncoder", "TensorDecoder", "TensorEncoder", "TensorMeta"]
