"""The attention of transformers' Nyströmformer and Reformer modules, with their projections replaced by fixed arrays.

Nyströmformer supports nystrom_attention with a multiple of the landmarks as tokens, one feature size for q, k, v (the
adapter pads with zeros and crops), 6 steps, and key masks as an additive mask. Its default start of the inverse is
`batch_max` here; its counterpart of "exact" is an option of the configuration. Reformer's LSHSelfAttention draws its
rotations: the adapter hashes with those of the call and passes the buckets. Supported are whole chunks, at least two.
"""

from __future__ import annotations

import torch
import transformers
from torch.nn.functional import pad
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import equal_tokens, refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Foreign, Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

NYSTROM = ("q", "k", "v", "num_landmarks", "inverse_steps", "init", "mask", "key_lengths", "scale")
STEPS = 6
LSH = ("qk", "v", "rotations", "chunk_size", "mask", "causal")


class Constant(torch.nn.Module):
    """Replaces a projection: returns a fixed array, with heads side by side."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, H·d) of (B, H, T, d)."""
        return self.x.transpose(1, 2).flatten(2)


def hiding(seen: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The additive mask: the bias or 0, and the lowest float at hidden pairs."""
    return torch.where(seen, torch.zeros((), dtype=dtype) if bias is None else bias, torch.finfo(dtype).min).to(dtype)


class Nystromformer(TorchPeer):
    """nystrom_attention."""

    ops = ("nystrom_attention",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: uneven segments, other numbers of steps, and masks of pairs."""
        reason = refusal(arrays, params, NYSTROM) or equal_tokens(*(arrays[name].shape for name in ("q", "k", "v")))
        tokens, landmarks = arrays["q"].shape[-2], option(params, "num_landmarks", 1)
        if reason is None and (not tokens or tokens % landmarks):
            return "tokens are a multiple of the landmarks"
        if reason is None and params.get("inverse_steps", STEPS) != STEPS:
            return f"always {STEPS} steps"
        return reason

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One module with the arrays instead of its projections."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        heads, tokens, own = q.shape[1:]
        width = max(own, v.shape[-1])
        config = transformers.NystromformerConfig(
            hidden_size=heads * width, num_attention_heads=heads, num_landmarks=params["num_landmarks"],
            segment_means_seq_len=tokens, inv_coeff_init_option=params.get("init") != "batch_max",
        )  # fmt: skip
        module: Foreign = NystromformerSelfAttention(config).eval()
        module.conv_kernel_size = None  # no convolution of v on top
        q = q * (params.get("scale", own**-0.5) * width**0.5)  # the module divides by √width
        module.query, module.key, module.value = (Constant(pad(x, (0, width - x.shape[-1]))) for x in (q, k, v))
        seen = visible_keys(arrays, params)
        mask = None
        if seen is not None:  # (B, 1, 1, T), as in every module of the library
            pairs = seen.expand(q.shape[0], *seen.shape[1:-2], 1, tokens) if seen.ndim == 4 else seen
            mask = hiding(pairs, q.dtype)
        o = module(q.transpose(1, 2).flatten(2), mask)[0]
        return {"o": o.unflatten(-1, (heads, -1)).transpose(1, 2)[..., : v.shape[-1]]}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The module with the arrays instead of its projections; all have the same features."""
        masked = visible_keys(arrays, params) is not None
        lines = (
            "heads, tokens, features = q.shape[1:]",
            "config = transformers.NystromformerConfig(",
            f"    hidden_size=heads * features, num_attention_heads=heads, num_landmarks={params['num_landmarks']},",
            f"    segment_means_seq_len=tokens, inv_coeff_init_option={params.get('init') != 'batch_max'},",
            ")",
            "module = NystromformerSelfAttention(config).eval()",
            "module.conv_kernel_size = None  # no convolution of v on top",
            "joined = lambda x: x.transpose(1, 2).flatten(2)",
            "for name, x in (('query', q), ('key', k), ('value', v)):",
            "    projection = torch.nn.Identity()",
            "    projection.forward = lambda hidden, x=x: joined(x)",
            "    setattr(module, name, projection)",
            *(
                ("mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)",)
                if masked
                else ()
            ),
            f"o = module(joined(q), {'mask' if masked else 'None'})[0]",
        )
        imports = (
            "import transformers",
            "from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention",
        )
        result = "o.unflatten(-1, (heads, -1)).transpose(1, 2)"
        return Source("torch", imports, lines, result, "transformers.__version__")


class Reformer(TorchPeer):
    """lsh_attention."""

    ops = ("lsh_attention",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: fewer than two chunks, or partial chunks."""
        reason = refusal(arrays, params, LSH) or equal_tokens(arrays["qk"].shape, arrays["v"].shape)
        tokens, chunk = arrays["qk"].shape[-2], option(params, "chunk_size", 1)
        if reason is None and (tokens % chunk or tokens <= chunk):
            return "takes whole chunks, at least two"
        return reason

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One module with the arrays instead of its projections, and the buckets of the rotations."""
        qk, v, rotations = (arrays[name] for name in ("qk", "v", "rotations"))
        batch, heads, tokens, d = qk.shape
        rounds, buckets = rotations.shape[-2], 2 * rotations.shape[-1]
        width = max(d, v.shape[-1])
        config = transformers.ReformerConfig(
            hidden_size=heads * width, num_attention_heads=heads, attention_head_size=width, num_hashes=rounds,
            num_buckets=buckets, lsh_attn_chunk_length=params["chunk_size"], is_decoder=bool(params.get("causal")),
            lsh_attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        module: Foreign = LSHSelfAttention(config, layer_idx=0).eval()
        module.query_key, module.value = (Constant(pad(x, (0, width - x.shape[-1]))) for x in (qk, v))
        if width != d:  # the module's key has the mean square of width features
            module._len_and_dim_norm = lambda x, root: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6 * d)
        hashed = self.hashed(qk, rotations) + buckets * torch.arange(rounds)[:, None]
        mask = None
        if "mask" in arrays:  # (T,) or (B, 1, 1, T)
            mask = arrays["mask"].expand(batch, 1, 1, tokens)[:, 0, 0]
        hidden = qk.transpose(1, 2).flatten(2)
        o = module(hidden, attention_mask=mask, buckets=hashed.flatten(2)).hidden_states
        return {"o": o.unflatten(-1, (heads, -1)).transpose(1, 2)[..., : v.shape[-1]]}

    def hashed(self, qk: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """(B, H, rounds, T): the first argmax of [x R, -x R]."""
        directions = rotations.to(qk.dtype).expand(qk.shape[1], *rotations.shape[-3:])
        projected = torch.einsum("bhtd,hdrm->bhrtm", qk.detach(), directions)
        return torch.cat([projected, -projected], -1).argmax(-1)

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The module with the arrays instead of its projections; all have the same features."""
        rounds, buckets = arrays["rotations"].shape[-2], 2 * arrays["rotations"].shape[-1]
        masked = "mask" in arrays
        lines = (
            "heads, tokens, features = qk.shape[1:]",
            "config = transformers.ReformerConfig(",
            "    hidden_size=heads * features, num_attention_heads=heads, attention_head_size=features,",
            f"    num_hashes={rounds}, num_buckets={buckets}, lsh_attn_chunk_length={params['chunk_size']},",
            f"    is_decoder={bool(params.get('causal'))}, lsh_attention_probs_dropout_prob=0.0,",
            ")",
            "module = LSHSelfAttention(config, layer_idx=0).eval()",
            "joined = lambda x: x.transpose(1, 2).flatten(2)",
            "for name, x in (('query_key', qk), ('value', v)):",
            "    projection = torch.nn.Identity()",
            "    projection.forward = lambda hidden, x=x: joined(x)",
            "    setattr(module, name, projection)",
            'projected = torch.einsum("bhtd,hdrm->bhrtm", qk, rotations)',
            "buckets = torch.cat([projected, -projected], -1).argmax(-1)",
            f"buckets = (buckets + {buckets} * torch.arange({rounds})[:, None]).flatten(2)",
            *(("mask = mask.expand(qk.shape[0], 1, 1, tokens)[:, 0, 0]",) if masked else ()),
            f"o = module(joined(qk), attention_mask={'mask' if masked else 'None'}, buckets=buckets).hidden_states",
        )
        imports = ("import transformers", "from transformers.models.reformer.modeling_reformer import LSHSelfAttention")
        result = "o.unflatten(-1, (heads, -1)).transpose(1, 2)"
        return Source("torch", imports, lines, result, "transformers.__version__")


def adapters() -> list[Adapter]:
    """Both modules; their masks exist for float32 only."""
    version = transformers.__version__
    return [
        Nystromformer(
            "transformers-nystromformer",
            ("float64", "float32"),
            f"transformers {version}, NystromformerSelfAttention, CPU, autograd",
        ),
        Reformer(
            "transformers-reformer", ("float64", "float32"), f"transformers {version}, LSHSelfAttention, CPU, autograd"
        ),
    ]
