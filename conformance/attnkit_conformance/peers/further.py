"""What no case of the kit meets: disagreements that need more tokens, or options that no definition has.

Each is a program that computes `got` by the library and `expected` by the formula, and prints how far apart they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_conformance.peers import missing_modules

FORMULA = """
import numpy as np

def softmax_attention(q, k, v, seen=True):
    s = np.where(seen, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True) @ v
"""
SHOWN = """
print("{package}", importlib.metadata.version("{package}"), "is off by", float(np.max(np.abs(got - expected))))
"""


@dataclass(frozen=True)
class Further:
    """A disagreement beyond the cases: of a family of adapters, in one sentence, with the lines of its program."""

    family: str
    package: str
    reason: str
    lines: str

    @property
    def program(self) -> str:
        """What can be run."""
        return f"import importlib.metadata\n{FORMULA}\n{self.lines.strip()}\n{SHOWN.format(package=self.package)}"


FURTHER = (
    Further(
        "flash_attention_jax", "flash-attention-jax",
        "with more than 1024 queries or keys, not a multiple of 1024, the last block starts too early: 1,500 queries "
        "have 2,048 rows, and keys are counted twice; causal_flash_attention and rabe_attention are a TypeError there",
        """
from flash_attention_jax import flash_attention

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 1500, 8)).astype(np.float32)
got = np.asarray(flash_attention(q, k, v, np.ones((1, 1500), bool)))
print("rows:", got.shape[2])
got, expected = got[:, :, :1500], softmax_attention(q, k, v)
""",
    ),
    Further(
        "memory_efficient_attention_pytorch", "memory-efficient-attention-pytorch",
        "causal with 4 queries and 6 keys, memory_efficient_attention lets query i see the keys j ≤ i, its own "
        "attention j ≤ i + 2, which is the definition's",
        """
import torch
from memory_efficient_attention_pytorch.memory_efficient_attention import attention, memory_efficient_attention

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, n, 5)) for n in (4, 6, 6))
arguments = [torch.tensor(x) for x in (q, k, v)]
got = memory_efficient_attention(*arguments, causal=True).numpy()
expected = softmax_attention(q, k, v, np.arange(6) <= np.arange(4)[:, None] + 2)
own = attention(*arguments, causal=True).numpy()
print("its own attention is off by", np.max(np.abs(own - expected)))
""",
    ),
    Further(
        "memory_efficient_attention_pytorch", "memory-efficient-attention-pytorch",
        "causal with 4 queries and 6 keys, FlashAttentionFunction lets query i see the keys j ≤ i - 2: the difference "
        "of lengths has the other sign",
        """
import torch
from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, n, 5)).astype(np.float32) for n in (4, 6, 6))
got = FlashAttentionFunction.apply(*map(torch.tensor, (q, k, v)), None, True, 512, 1024).numpy()
expected = softmax_attention(q, k, v, np.arange(6) <= np.arange(4)[:, None] + 2)
""",
    ),
    Further(
        "ring_attention_pytorch", "ring-attention-pytorch",
        "a mask of keys is dropped where a call of default_attention or ring_flash_attn is causal",
        """
import torch
from ring_attention_pytorch.ring_attention import default_attention

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 6, 5))
mask = np.array([[False, True, True, True, False, True]])
turned = [torch.tensor(x).transpose(1, 2) for x in (q, k, v)]
got = default_attention(*turned, mask=torch.tensor(mask), causal=True).transpose(1, 2).numpy()[:, :, 1:]
i = np.arange(6)
expected = softmax_attention(q[:, :, 1:], k, v, mask & (i <= i[1:, None]))
""",
    ),
    Further(
        "ring_attention_pytorch", "ring-attention-pytorch",
        "causal ring_flash_attn of several buckets, with fewer queries than keys, counts the buckets of both from the "
        "start",
        """
import torch
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, n, 5)).astype(np.float32) for n in (700, 1100, 1100))
turned = [torch.tensor(x).transpose(1, 2) for x in (q, k, v)]
got = ring_flash_attn(*turned, causal=True).transpose(1, 2).numpy()
expected = softmax_attention(q, k, v, np.arange(1100) <= np.arange(700)[:, None] + 400)
""",
    ),
    Further(
        "nystrom_attention", "nystrom-attention",
        "where the landmarks do not divide the tokens, zeros are added in front of them, which are keys unless a "
        "mask is passed: one token with two landmarks gets half of its value",
        """
import torch
from nystrom_attention import NystromAttention

module = NystromAttention(1, dim_head=1, heads=1, num_landmarks=2, residual=False)
module.to_qkv = module.to_out = torch.nn.Identity()
got = module(torch.tensor([[[0.0, 0.0, 1.0]]])).numpy()  # q, k, v
expected = np.ones((1, 1, 1))
""",
    ),
    Further(
        "local_attention", "local-attention",
        "where the window does not divide the tokens, autopad adds zeros behind them, which are keys of the last "
        "queries unless a mask is passed",
        """
import torch
from local_attention import LocalAttention

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 5, 4))
module = LocalAttention(2, exact_windowsize=True, autopad=True)
got = module(*map(torch.tensor, (q, k, v))).numpy()
i = np.arange(5)
expected = softmax_attention(q, k, v, np.abs(i - i[:, None]) <= 2)
masked = module(*map(torch.tensor, (q, k, v)), mask=torch.ones(1, 5, dtype=torch.bool)).numpy()
print("with a mask of ones it is off by", np.max(np.abs(masked - expected)))
""",
    ),
    Further(
        "linear_attention_transformer", "linear-attention-transformer",
        "linear_attn overwrites the caller's k and v where a mask hides keys",
        """
import torch
from linear_attention_transformer.linear_attention_transformer import linear_attn

q, k, v = map(torch.tensor, np.random.default_rng(0).standard_normal((3, 1, 1, 3, 4)))
expected = np.concatenate([k.numpy(), v.numpy()])
linear_attn(q, k, v, torch.tensor([[True, True, False]]))
got = np.concatenate([k.numpy(), v.numpy()])
""",
    ),
    Further(
        "linear_attention_transformer", "linear-attention-transformer",
        "causal_linear_attn with its default bucket of 64 tokens: a query sees the buckets before its own, and the "
        "first 64 outputs are 0",
        """
import torch
from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 128, 4))
got = causal_linear_attn(*map(torch.tensor, (q, k, v))).numpy()
i = np.arange(128)
w = (np.exp(q) @ np.exp(k).swapaxes(-1, -2)) * (i <= i[:, None])
expected = w / w.sum(-1, keepdims=True) @ v
""",
    ),
    Further(
        "fla", "fla-core",
        "naive_forgetting_attn rounds the running sum of gates to float32: behind 4,000 steps of -30 a gate of -0.003 "
        "is 0, and the key before it weighs as much as the one that it is of",
        """
import importlib.util
from pathlib import Path
import torch

path = Path(importlib.util.find_spec("fla").origin).parent / "ops" / "forgetting_attn" / "naive.py"
spec = importlib.util.spec_from_file_location("naive", path)  # fla itself imports Triton
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)
gates = torch.tensor([-30.0] * 4000 + [-0.003])[None, :, None]
v = torch.tensor([0.0] * 4000 + [100.0])[None, :, None, None]
q = torch.zeros(v.shape)
got = naive.naive_forgetting_attn(q, q, v, gates)[0, -1].numpy()
expected = np.array([[100 / (1 + np.exp(-0.003))]])  # of the last two keys; nothing is left of the others
""",
    ),
    Further(
        "transformers", "transformers",
        "the state of Qwen3-Next's gated delta rule fades at padding behind the tokens: hidden states become 0 there, "
        "gates and β are still those of a 0",
        """
import inspect
from unittest.mock import patch
import torch
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

config = Qwen3NextConfig(
    hidden_size=4, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=4, linear_value_head_dim=4,
    linear_conv_kernel_dim=1, num_hidden_layers=1, layer_types=["linear_attention"],
)
torch.manual_seed(0)
module = modeling.Qwen3NextGatedDeltaNet(config, 0)
x = torch.randn(1, 3, 4)

def state(x, mask):
    cache = DynamicCache(config=config)
    plain = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)  # not fla's, which need a GPU
    with torch.no_grad(), patch.object(modeling, "torch_chunk_gated_delta_rule", plain):
        module(x, cache_params=cache, attention_mask=mask)
    return cache.get_recurrent_state(0, state_idx=0).numpy()

got = state(x, torch.tensor([[1, 1, 0]]))
expected = state(x[:, :2], torch.tensor([[1, 1]]))
""",
    ),
)  # fmt: skip


def of(families: set[str]) -> tuple[Further, ...]:
    """Those of some families whose packages are installed."""
    return tuple(one for one in FURTHER if one.family in families and not missing_modules(one.family))
