"""Attention within a sequence with one projection for queries and keys: Reformer's and SOFT's."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import attnkit
from attnkit._core.typing import Keywords
from attnkit.nn.placement import Device
from attnkit.nn.record import Attention, attention, keep


class SharedQueryKeyAttention(nn.Module):
    """out = concat_h(attend(q_h, v_h)) W_o, q = x W_q being queries and keys, v = x W_v: the base of the classes below.

    Raises:
        ValueError: dim is no multiple of num_heads.
    """

    def __init__(
        self, dim: int, num_heads: int, *, qkv_bias: bool, out_bias: bool, device: Device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            name = type(self).__name__
            raise ValueError(f"{name}: dim must be a multiple of num_heads; got {dim} and {num_heads}")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Attend between the tokens of each sequence.

        Args:
            x: (B, n, dim).
            token_mask: boolean (B, n), True = a token. Others are neither key nor query and may be NaN; their output is
                that of W_o for 0.

        Returns:
            (B, n, dim).
        """
        if token_mask is not None:
            x = torch.where(token_mask[..., None], x, 0.0)
        q, v = (proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for proj in self._inputs())
        heads = self.attend(q, v, None if token_mask is None else token_mask[:, None, :])
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return out

    def _inputs(self) -> tuple[nn.Linear, nn.Linear]:
        return self.q_proj, self.v_proj

    def attend(self, q: Tensor, v: Tensor, tokens: Tensor | None) -> Tensor:
        """(B, heads, n, head_dim) from q and v of that shape and `tokens`, boolean (B, 1, n) or None."""
        raise NotImplementedError


class LSHAttention(SharedQueryKeyAttention):
    """Attention among neighbours in the order of hashes: `attnkit.lsh_attention` (Kitaev et al. 2020 §2).

    The rotations (num_heads, head_dim, num_hashes, num_buckets/2) are a buffer, drawn once from `seed`. The authors
    redraw them at every call, which makes the evaluation of a model random; use `redraw` for that.

    Args:
        dim: features of x and of the output, a multiple of num_heads.
        num_heads: heads.
        num_buckets: even. The authors take 2·max(1, n // chunk_size) for sequences of n tokens.
        num_hashes: rounds of hashing.
        chunk_size: tokens of a chunk.
        seed: of the rotations.
        causal: tokens attend to those before them only.
        qkv_bias, out_bias: whether the projections have biases; the authors' have none.
        impl: the op's implementation, see `attnkit.explain`.

    The output depends on the amount of padding after the tokens, though never on its contents: padding is sorted after
    the tokens of its round, and so shifts the chunk boundaries of the next.

    Raises:
        ValueError: sizes that do not divide or are too small, an odd num_buckets.
    """

    rotations: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_buckets: int,
        num_hashes: int = 2,
        chunk_size: int = 64,
        seed: int = 0,
        causal: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
        impl: str | tuple[str, ...] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, out_bias=out_bias, device=device, dtype=dtype)
        if chunk_size < 1:
            raise ValueError(f"LSHAttention: chunk_size must be at least 1; got {chunk_size}")
        self.num_buckets, self.num_hashes, self.chunk_size = num_buckets, num_hashes, chunk_size
        self.causal, self.impl = causal, impl
        rotations = self._drawn(seed)
        self.register_buffer("rotations", torch.empty(rotations.shape, device=device, dtype=dtype).copy_(rotations))
        keep(self)

    @property
    def attends_with(self) -> Attention:
        return attention(attnkit.lsh_attention, {"chunk_size": self.chunk_size}, self.impl)

    def _drawn(self, seed: int) -> Tensor:
        rounds = self.num_heads * self.num_hashes
        rotations = torch.from_numpy(attnkit.random_rotations(self.head_dim, rounds, self.num_buckets, seed))
        return rotations.unflatten(1, (self.num_heads, self.num_hashes)).movedim(1, 0)

    def redraw(self, seed: int) -> None:
        """Redraw the rotations in place."""
        with torch.no_grad():
            self.rotations.copy_(self._drawn(seed))

    def extra_repr(self) -> str:
        sizes = f"num_hashes={self.num_hashes}, num_buckets={self.num_buckets}, chunk_size={self.chunk_size}"
        return f"num_heads={self.num_heads}, {sizes}" + (", causal=True" if self.causal else "")

    def attend(self, q: Tensor, v: Tensor, tokens: Tensor | None) -> Tensor:
        mask = None if tokens is None else tokens[:, :, None, :]
        options: Keywords = {"chunk_size": self.chunk_size, "causal": self.causal, "impl": self.impl}
        out: Tensor = attnkit.lsh_attention(q, v, self.rotations, mask=mask, **options)
        return out


class SoftAttention1d(SharedQueryKeyAttention):
    """SOFT over a sequence: `attnkit.soft_attention` with the means of windows as landmarks (Lu et al. 2021 §3, §4.5).

    The last window may be incomplete; a mean runs over its valid tokens, and a window without any is not a landmark. So
    padding after the tokens changes nothing. `SoftAttention2d` is the same for images.

    Args:
        dim: features of x and of the output, a multiple of num_heads.
        num_heads: heads.
        window: tokens of a window, and its stride; the paper's 4.
        newton_steps, init_scale, halvings, ridge, inverse_grad: as in `attnkit.soft_attention`. The paper has no
            ridge, the authors' code for images uses 0.01.
        qkv_bias, out_bias: whether the projections have biases.
        impl: the op's implementation, see `attnkit.explain`.

    Raises:
        ValueError: sizes that do not divide or are too small.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int = 4,
        newton_steps: int = 20,
        init_scale: float = 0.9,
        halvings: int = 0,
        ridge: float = 0.0,
        inverse_grad: str = "implicit",
        qkv_bias: bool = True,
        out_bias: bool = True,
        impl: str | tuple[str, ...] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, out_bias=out_bias, device=device, dtype=dtype)
        if window < 1:
            raise ValueError(f"SoftAttention1d: window must be at least 1; got {window}")
        self.window, self.impl = window, impl
        self.options: Keywords = {
            "newton_steps": newton_steps,
            "init_scale": init_scale,
            "halvings": halvings,
            "ridge": ridge,
            "inverse_grad": inverse_grad,
        }
        keep(self)

    @property
    def attends_with(self) -> Attention:
        return attention(attnkit.soft_attention, self.options, self.impl)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"num_heads={self.num_heads}, window={self.window}, {options}"

    def attend(self, q: Tensor, v: Tensor, tokens: Tensor | None) -> Tensor:
        landmarks, landmark_mask = _window_means(q, self.window, tokens)
        masks: Keywords = {} if tokens is None else {"query_mask": tokens, "landmark_mask": landmark_mask}
        out: Tensor = attnkit.soft_attention(q, v, landmarks, impl=self.impl, **masks, **self.options)
        return out


def _window_means(q: Tensor, window: int, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means (B, H, m, d) over windows of the tokens of q (B, H, n, d), m = ⌈n/window⌉, and which have any (B, 1, m).

    In the compute dtype until the end, as in `attnkit.landmarks`.
    """
    n = q.shape[-2]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    there = q.new_ones(1, 1, n, dtype=torch.bool) if tokens is None else tokens
    cut = pad(q.to(wide), (0, 0, 0, -n % window)).unflatten(-2, (-1, window))
    share = pad(there, (0, -n % window)).unflatten(-1, (-1, window)).to(wide)
    count = share.sum(-1)
    total = (cut * share[..., None]).sum(-2)
    return (total / count.clamp(min=1)[..., None]).to(q.dtype), count > 0
