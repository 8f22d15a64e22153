"""x-transformers' Attend, which all of its attention layers call: by its own formula, and by torch's SDPA (`flash`).

Takes masks of pairs, a bias, a causal flag, a scale and grouped heads.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import torch
from x_transformers.attend import Attend

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.torch_base import TorchHeads


def attend(flash: bool, call: Call) -> torch.Tensor:
    module = Attend(causal=call.causal, scale=call.scale, flash=flash)
    o: torch.Tensor = module(call.q, call.k, call.v, mask=call.seen, attn_bias=call.bias)[0]
    return o


def adapters() -> list[Adapter]:
    """With and without SDPA."""
    return [
        TorchHeads(
            Function(
                f"x_transformers-{'flash' if flash else 'plain'}",
                f"x-transformers {version('x-transformers')}, Attend(flash={flash})", ("float64", "float32"),
                Takes("pairs", "lower_right", bias=True, scale=True, grouped=True), partial(attend, flash),
                f"Attend(causal={{causal}}, scale={{scale}}, flash={flash})"
                "({q}, {k}, {v}, mask={mask}, attn_bias={bias})[0]",
                ("import importlib.metadata", "from x_transformers.attend import Attend"),
                'importlib.metadata.version("x-transformers")',
            )
        )
        for flash in (False, True)
    ]  # fmt: skip
