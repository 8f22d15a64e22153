"""Where a module makes its tensors."""

from typing import TypedDict

import torch

Device = torch.device | str | int | None
"""As torch takes it; None is torch's default."""


class New(TypedDict):
    """The keyword arguments of a new tensor."""

    device: Device
    dtype: torch.dtype | None
