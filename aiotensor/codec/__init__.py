"""Messages with tensors inside, as msgpack.

A message is any msgspec Struct, dataclass, list or dict, nested as you like, with tensors and numpy arrays
anywhere in it:

    encoder = TensorEncoder()
    decoder = TensorDecoder(Video)
    body, *buffers = encoder.encode(Video(fps=30.0, frames=frames))
    video = decoder.decode([body, *buffers])

Small tensors ride in the body. Large ones become buffers beside it, which show the tensor's own memory; the
decoder's tensors lie in the buffers that it was given. So nothing is copied, as with the out-of-band buffers
of pickle, but nothing is pickled either.

Whoever has a better road for tensors gives the encoder a `place`, which takes a tensor and returns an opaque
handle, or None for "not mine"; and the decoder a `find`, which turns the handle back.
"""

from aiotensor.codec.decoder import Find, TensorDecoder
from aiotensor.codec.encoder import Place, SourceEncoder, TensorEncoder
from aiotensor.codec.meta import TensorMeta
from aiotensor.codec.wire import PACKED

__all__ = ["PACKED", "Find", "Place", "SourceEncoder", "TensorDecoder", "TensorEncoder", "TensorMeta"]
