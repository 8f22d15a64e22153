"""SOFT's attention block for images (Lu et al. 2021)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu

import attnkit
from attnkit._core.autograd import keep_autocast_out
from attnkit._core.special import without_autocast
from attnkit._core.typing import Keywords, Outputs
from attnkit.nn.placement import Device, New
from attnkit.nn.record import Attention, attention, keep

SAMPLINGS = ("average_pool", "convolution", "random", "biased")


class SoftAttention2d(nn.Module):
    """out = concat_h(soft_attention(q_h, v_h, landmarks_h)) W_o, q = x W_q being queries and keys, v = x W_v.

    Lu et al. 2021 §3: landmarks are made from q by one of four samplers (`attnkit.landmarks`). The defaults are the
    paper's formulas with its default sampler. The authors' code is sampling="convolution", ridge=0.01,
    landmark_norm=True and value_conv=9, 5, 3 in its stages.

    Args:
        dim: features of x and of the output, a multiple of num_heads.
        num_heads: heads.
        sampling: "average_pool" or "convolution" over windows of stride × stride tokens; "random" or "biased" (the
            first ones): `num_landmarks` tokens.
        stride: side and stride of the windows, r; incomplete windows are dropped.
        num_landmarks: m for "random" and "biased"; default: the number of windows. With "average_pool" a square number:
            √m × √m windows that cover the image as evenly as possible, instead of those of `stride`; they overlap where
            √m does not divide a side. m is then the same for every image size.
        seed: of the positions that "random" picks: the same for every call with as many tokens, also in evaluation.
        newton_steps, init_scale, halvings, ridge, inverse_grad: as in `attnkit.soft_attention`.
        landmark_norm: landmarks become c·gelu(LayerNorm(landmark / c)) over the features of a head, c = head_dim^¼
            being the length of which the kernel's distances are multiples: the authors' code takes LayerNorm and GELU
            after dividing q by it.
        value_conv: None, or the odd side of a convolution of v, one kernel per head and no bias, that is added to the
            output of the heads.
        qkv_bias, out_bias: whether the projections have biases.
        impl: the op's implementation, see `attnkit.explain`.

    Raises:
        ValueError: sizes that do not divide or are too small, an unknown sampling, an even value_conv, num_landmarks
            with "convolution", or a number of them that is not a square with "average_pool".
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sampling: str = "average_pool",
        stride: int = 2,
        num_landmarks: int | None = None,
        seed: int = 0,
        newton_steps: int = 20,
        init_scale: float = 0.9,
        halvings: int = 0,
        ridge: float = 0.0,
        inverse_grad: str = "implicit",
        landmark_norm: bool = False,
        value_conv: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        impl: str | tuple[str, ...] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"SoftAttention2d: dim must be a multiple of num_heads; got {dim} and {num_heads}")
        if sampling not in SAMPLINGS:
            raise ValueError(f"SoftAttention2d: sampling must be one of {', '.join(SAMPLINGS)}; got {sampling!r}")
        if stride < 1 or (num_landmarks is not None and num_landmarks < 1):
            sizes = f"{stride} and {num_landmarks}"
            raise ValueError(f"SoftAttention2d: stride and num_landmarks must be at least 1; got {sizes}")
        if num_landmarks is not None and (
            sampling == "convolution" or (sampling == "average_pool" and math.isqrt(num_landmarks) ** 2 < num_landmarks)
        ):
            expected = "None" if sampling == "convolution" else "a square number"
            raise ValueError(f"SoftAttention2d: num_landmarks must be {expected} for {sampling}; got {num_landmarks}")
        if value_conv is not None and value_conv % 2 == 0:
            raise ValueError(f"SoftAttention2d: value_conv must be odd; got {value_conv}")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.sampling, self.stride, self.num_landmarks, self.seed, self.impl = (
            sampling,
            stride,
            num_landmarks,
            seed,
            impl,
        )
        self.options: Keywords = {
            "newton_steps": newton_steps,
            "init_scale": init_scale,
            "halvings": halvings,
            "ridge": ridge,
            "inverse_grad": inverse_grad,
        }
        new: New = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, dim, bias=qkv_bias, **new)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias, **new)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias, **new)
        d, r = self.head_dim, stride
        self.kernel = nn.Parameter(torch.empty(d, d, r, r, **new)) if sampling == "convolution" else None
        if self.kernel is not None:
            nn.init.uniform_(self.kernel, -1.0 / (r * d**0.5), 1.0 / (r * d**0.5))
        self.landmark_norm = nn.LayerNorm(d, **new) if landmark_norm else None
        h, side = num_heads, value_conv
        conv = None if side is None else nn.Conv2d(h, h, side, padding=side // 2, groups=h, bias=False, **new)
        self.value_conv = conv
        keep(self)

    @property
    def attends_with(self) -> Attention:
        # not how many landmarks or which, as they may be others for pictures of another size
        return attention(attnkit.soft_attention, self.options | {"sampling": self.sampling}, self.impl)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        size = f"stride={self.stride}" if self.num_landmarks is None else f"num_landmarks={self.num_landmarks}"
        return f"num_heads={self.num_heads}, sampling={self.sampling!r}, {size}, {options}"

    def forward(
        self,
        x: Tensor,
        height: int | None = None,
        width: int | None = None,
        *,
        token_mask: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend between the tokens of each image.

        Args:
            x: (B, height, width, dim), or (B, height·width, dim) row by row with height and width given.
            token_mask: boolean (B, height·width), True = a token. Others are neither key nor query, enter no landmark,
                and may be NaN; their output is that of W_o for 0.
            indices: for sampling "random": integers (m,) or (B, 1, m), instead of those of the seed.

        Returns:
            The shape of x.
        """
        shape = x.shape
        x, height, width = _flat(x, height, width)
        tokens = None if token_mask is None else token_mask[:, None, :]
        if token_mask is not None:
            x = torch.where(token_mask[..., None], x, 0.0)
        q, v = (self._heads(proj(x)) for proj in (self.q_proj, self.v_proj))
        landmarks, landmark_mask = self._landmarks(q, height, width, tokens, indices)
        masks: Keywords = {} if tokens is None else {"query_mask": tokens, "landmark_mask": landmark_mask}
        heads = attnkit.soft_attention(q, v, landmarks, impl=self.impl, **masks, **self.options)
        joined = heads.transpose(1, 2).flatten(2)
        if self.value_conv is not None:
            joined = joined + _convolved(self.value_conv, v, height, width, token_mask)
        return self.out_proj(joined).reshape(shape)

    def queries_and_landmarks(
        self, x: Tensor, height: int | None = None, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, heads, n, head_dim) and (B, heads, m, head_dim): the operands of the weights, for inspection."""
        x, height, width = _flat(x, height, width)
        q = self._heads(self.q_proj(x))
        return q, self._landmarks(q, height, width, None, None)[0]

    def _heads(self, x: Tensor) -> Tensor:
        """(B, n, dim) -> (B, heads, n, head_dim), a view."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _landmarks(
        self, q: Tensor, height: int, width: int, tokens: Tensor | None, indices: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        n, r = q.shape[-2], self.stride
        count = self.num_landmarks or (height // r) * (width // r)
        if self.sampling == "average_pool" and self.num_landmarks is not None:
            result = _even_means(q, height, width, math.isqrt(self.num_landmarks), tokens)
        elif self.sampling == "average_pool":
            result = attnkit.landmarks.average_pool(q, height, width, r, query_mask=tokens)
        elif self.kernel is not None:
            kernel = self.kernel.to(q.dtype)
            result = attnkit.landmarks.convolution(q, kernel, height, width, r, query_mask=tokens)
        elif self.sampling == "biased":
            result = attnkit.landmarks.biased(q, min(count, n), query_mask=tokens)
        else:
            if indices is None:
                sample = attnkit.landmarks.random_indices(n, min(count, n), self.seed)
                indices = torch.as_tensor(sample, device=q.device)
            result = attnkit.landmarks.random(q, indices, query_mask=tokens)
        landmarks, mask = (result, None) if tokens is None else result
        if self.landmark_norm is not None:
            length = self.head_dim**0.25
            landmarks = (length * gelu(self.landmark_norm(landmarks / length))).to(q.dtype)
        return landmarks, mask


def _flat(x: Tensor, height: int | None, width: int | None) -> tuple[Tensor, int, int]:
    """(B, height·width, dim), height and width for either form of x."""
    shape = x.shape
    if x.ndim == 4:
        height, width = x.shape[1:3]
        x = x.flatten(1, 2)
    if height is None or width is None or height * width != x.shape[1]:
        got = f"{tuple(shape)}, height {height} and width {width}"
        raise ValueError(f"SoftAttention2d: x must be (B, height, width, dim) or (B, height·width, dim); got {got}")
    return x, height, width


def _even_means(q: Tensor, height: int, width: int, side: int, tokens: Tensor | None) -> Outputs:
    """Means of q (B, heads, n, d) over side × side windows, [⌊i·h/side⌋, ⌈(i+1)·h/side⌉) along each axis.

    As `attnkit.landmarks.average_pool`: with tokens (B, 1, n) over those, and with the mask of windows that have any.
    """
    wide = q.dtype if q.dtype == torch.float64 else torch.float32

    def windows(length: int) -> Tensor:
        if side > length:
            raise ValueError(f"SoftAttention2d: num_landmarks {side**2} does not fit pictures of {height}×{width}")
        i, place = torch.arange(side, device=q.device)[:, None], torch.arange(length, device=q.device)
        return ((place >= i * length // side) & (place * side < (i + 1) * length)).to(wide)

    def totals(x: Tensor) -> Tensor:
        pictures = x.to(wide).unflatten(-2, (height, width))
        return torch.einsum("ah,bw,...hwd->...abd", windows(height), windows(width), pictures).flatten(-3, -2)

    present = q.new_ones(1, 1, q.shape[-2], dtype=torch.bool) if tokens is None else tokens
    with without_autocast(q):
        count = totals(present[..., None])
        means = (totals(torch.where(present[..., None], q, 0.0)) / count.clamp(min=1)).to(q.dtype)
    keep_autocast_out(means, (q,), {})
    return means if tokens is None else (means, count[..., 0] > 0)


def _convolved(conv: nn.Conv2d, v: Tensor, height: int, width: int, token_mask: Tensor | None) -> Tensor:
    """A convolution of v (B, heads, n, head_dim), a kernel per head, as (B, n, dim); padding enters and becomes 0."""
    d, flat = v.shape[-1], v.transpose(1, 2).flatten(2)
    if token_mask is not None:
        flat = torch.where(token_mask[..., None], flat, 0.0)
    kernels = conv.weight.repeat_interleave(d, dim=0)
    pictures = flat.transpose(1, 2).unflatten(-1, (height, width))
    out = conv2d(pictures, kernels, padding=conv.padding, groups=len(kernels)).flatten(2).transpose(1, 2)
    return out if token_mask is None else torch.where(token_mask[..., None], out, 0.0)
