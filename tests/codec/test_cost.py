import pytest
import torch

from aiotensor.codec.cost import takes_long
from aiotensor.memory.copying import QUICK_BYTES
from aiotensor.memory.inline import MAX_INLINE_BYTES

SMALL = torch.zeros(MAX_INLINE_BYTES, 2, dtype=torch.uint8)[:, 0]  # not flat


@pytest.mark.parametrize(("nbytes", "is_long"), [(QUICK_BYTES // 2, False), (QUICK_BYTES, True)])
def test_small_tensors_count_towards_the_bytes_to_gather(nbytes: int, is_long: bool) -> None:
    large = torch.zeros(nbytes, 2, dtype=torch.uint8)[:, 0]

    assert takes_long([*[SMALL] * 50, large], has_sender=False) == is_long
    assert not takes_long([*[SMALL] * 50, large], has_sender=True)
