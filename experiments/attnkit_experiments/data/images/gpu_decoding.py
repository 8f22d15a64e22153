"""JPEGs decoded by NVIDIA's nvImageCodec, in batches on a GPU, for a cache of pixels; on a CPU where torch has no GPU.

Source: nvImageCodec 0.9, https://docs.nvidia.com/cuda/nvimagecodec. It is an optional package. Pixels are not those of
Pillow: all of a JPEG is decoded, where Pillow decodes large ones at a fraction of their size, and decoders round
otherwise. What is no JPEG of one or three channels is decoded by Pillow, as all such images are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from attnkit_experiments.data.images.decoding.views import decode_with_sizes
from attnkit_experiments.data.unpacking import Place, Unreadable
from attnkit_experiments.engine.errors import UserError

GPU_CHUNK = 64  # images of a batch


def library() -> Any:
    """The module. Errors: UserError where it is not installed."""
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise UserError(
            f"--set jpeg_decoder=nvimgcodec: it cannot be imported ({error}); pip install nvidia-nvimgcodec-cu12"
        ) from None
    return nvimgcodec


class GpuDecoder:
    """A function like `decode_with_sizes`, for whole images."""

    def __init__(self) -> None:
        self.codec, on_gpu = library(), torch.cuda.is_available()
        device = self.codec.NVIMGCODEC_DEVICE_CURRENT if on_gpu else self.codec.NVIMGCODEC_DEVICE_CPU_ONLY
        backends = None if on_gpu else [self.codec.Backend(self.codec.BackendKind.CPU_ONLY)]
        self.decoder = self.codec.Decoder(device_id=device, backends=backends)
        # Pillow does not turn images either
        self.params = self.codec.DecodeParams(apply_exif_orientation=False, color_spec=self.codec.ColorSpec.SRGB)

    def __call__(self, items: Sequence[tuple[Place, Any]]) -> tuple[np.ndarray, np.ndarray]:
        side = items[0][1].side
        pixels = np.empty((len(items), side, side, 3), dtype=np.uint8)
        sizes = np.empty((len(items), 2), dtype=np.uint32)
        streams = [self._jpeg(place) for place, _ in items]
        ours = [at for at, stream in enumerate(streams) if stream is not None]
        decoded = self.decoder.decode([streams[at] for at in ours], params=self.params) if ours else []
        for at, image in zip(ours, decoded, strict=True):
            if image is None:
                raise Unreadable(items[at][0].name, "nvImageCodec cannot decode it")
            sizes[at] = image.width, image.height
        if ours:
            pixels[ours] = torch.stack([shrink(self._tensor(image), side) for image in decoded]).cpu().numpy()
        for at in (at for at, stream in enumerate(streams) if stream is None):
            pixels[at : at + 1], sizes[at : at + 1] = decode_with_sizes([items[at]])
        return pixels, sizes

    def _jpeg(self, place: Place) -> Any:
        """A place as a stream of nvImageCodec, None if it is no JPEG of one or three channels, or has more pixels than
        the limit, which Pillow says.
        """
        raw = place.read()
        if raw[:2] != b"\xff\xd8":
            return None
        try:
            stream = self.codec.CodeStream(raw)
        except RuntimeError as error:
            raise Unreadable(place.name, f"nvImageCodec cannot read it: {error}") from None
        small = stream.width * stream.height <= place.limits.pixels
        return stream if stream.codec_name == "jpeg" and stream.num_channels in (1, 3) and small else None

    def _tensor(self, image: Any) -> Tensor:
        """(H, W, 3) uint8, where it was decoded."""
        on_gpu = image.buffer_kind == self.codec.ImageBufferKind.STRIDED_DEVICE
        return torch.from_dlpack(image) if on_gpu else torch.from_numpy(np.array(image))


def shrink(image: Tensor, side: int) -> Tensor:
    """(H, W, 3) uint8 in side² pixels by the filter of `WholeImage`, bilinear and averaging where it shrinks."""
    pixels = image.permute(2, 0, 1)[None].float()
    resized = interpolate(pixels, (side, side), mode="bilinear", antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).round_().clamp_(0, 255).byte()
