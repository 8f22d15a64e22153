"""What torch's autocast does to the arguments of attention."""

import torch
from torch import Tensor

from attnkit._core.special import is_autocast


def in_dtype_of_autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    """The arrays in the dtype that torch's own attention function gets: that of autocast, except for float64.

    Where autocast is on, what a model adds to the outputs of its projections may make them float32 again, each in its
    own way: rotary embeddings, norms, a cache.
    """
    device = arrays[0].device.type
    if not is_autocast(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in arrays)
