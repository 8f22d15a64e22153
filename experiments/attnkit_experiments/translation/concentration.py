"""The attention and memories of a trained Translator: the measures of Shen et al. 2023, over real batches.

Everything is measured by `attnkit.analysis` and `attnkit.nn.capture`; this module applies them to:

- Table 1: variance of a memory's output beside that of its residual,
- Figure 2: share of the scores of a memory's slots that the largest p% hold, relu's divided by their sum (§3.4),
- Figure 3: anisotropy (eq 4) of a memory's value slots,
- Tables 3 and 5: entropy of the rows of attention in nats, of normalised weights,
- Figure 4: share of the weights of a row of attention that the largest p% hold,
- Figure 5: the weights themselves.

Means run over valid rows of tokens; padding is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attnkit
from attnkit.analysis import Concentration, weight_blocks
from attnkit.nn import KeyValueMemory, LayerAnalysis, capture
from attnkit_experiments.data.text.pairs import PAD
from attnkit_experiments.translation.model import Memory, TranslationConfig, Translator

PERCENTS = (0.2, 0.5, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0, 50.0)

# a memory's scores are those of an attention op without scale and length (attnkit.key_value_memory)
_SLOT_OPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "relu": (attnkit.pointwise_attention, {"activation": "relu", "alpha": 0.0}),
    "softmax": (attnkit.softmax_attention, {}),
}


class Analysis(NamedTuple):
    """`layers`: the analysis of each module; `slots`: {memory: {percent: share of its scores}}."""

    layers: dict[str, LayerAnalysis]
    slots: dict[str, dict[float, float]]

    def to_dict(self) -> dict[str, Any]:
        return {"layers": {name: layer.to_dict() for name, layer in self.layers.items()}, "slots": self.slots}

    def means(self) -> dict[str, float]:
        """One number per measure: the mean over the layers that have it, nan without one.

        The paper does not say over which layers its numbers run; these run over all: "variance_ratio" and
        "slot_anisotropy" over memories, "entropy" and "zeros" (weights that are 0) over encoder, decoder and
        cross-attention.
        """
        memories = [self.layers[name] for name in self.slots]
        attentions = [layer for name, layer in self.layers.items() if name not in self.slots]
        entropies = [layer.means["entropy"] for layer in attentions if "entropy" in layer.means]
        return {
            "variance_ratio": _mean([layer.variance_ratio for layer in memories]),
            "slot_anisotropy": _mean([layer.slot_anisotropy for layer in memories]),
            "entropy": _mean(entropies),
            "zeros": _mean([layer.zeros for layer in attentions if not math.isnan(layer.zeros)]),
        }


@torch.no_grad()
def analyse(
    model: Translator, batches: Iterable[tuple[Tensor, Tensor, Tensor]], *, percents: Sequence[float] = PERCENTS
) -> Analysis:
    """Run the model on batches of (source, source_mask, target_in) and measure every layer; call `model.eval()` before.

    Scores are recomputed in blocks for each measure: no (L, S) array is stored.
    """
    with capture(model, residuals=residuals(model.config), percents=percents) as record, ExitStack() as watched:
        slots = {
            name: watched.enter_context(_watched(module, percents))
            for name, module in model.named_modules()
            if isinstance(module, KeyValueMemory)
        }
        for source, source_mask, target_in in batches:
            masks = {"encoder.*": source_mask, "decoder.*": target_in != PAD}
            record.token_masks = masks
            for name, watch in slots.items():
                watch.tokens = masks["encoder.*" if name.startswith("encoder.") else "decoder.*"]
            model(source, source_mask, target_in)
    curves = {name: dict(zip(percents, watch.curve.value, strict=True)) for name, watch in slots.items()}
    return Analysis({layer.name: layer for layer in record.layers}, curves)


def residuals(config: TranslationConfig) -> dict[str, str]:
    """{branch: module whose input is the residual that the branch is added to}, as `capture` takes it."""
    branches = ("encoder.*.attention", "encoder.*.memory", "decoder.*.attention", "decoder.*.cross", "decoder.*.memory")
    return {branch: branch if config.norm == "post" else f"{branch}_norm" for branch in branches}


@torch.no_grad()
def attention_maps(model: Translator, source: Tensor, source_mask: Tensor, target_in: Tensor) -> dict[str, Tensor]:
    """{attention layer: its weights (B, heads, L, S), not normalised} on one batch."""
    maps: dict[str, Tensor] = {}
    with ExitStack() as watched:
        for name, attention in model.attentions().items():

            def look(
                op: Any, q: Tensor, k: Tensor, options: Any, name: str = name, weigh: Any = attention.weights_op
            ) -> None:
                maps[name] = weigh(q, k, impl="generic", **options)

            attention.observers.append(look)
            watched.callback(attention.observers.remove, look)
        model(source, source_mask, target_in)
    return maps


class _Slots:
    """The concentration of one memory's scores over the valid tokens (B, L)."""

    def __init__(self, percents: Sequence[float]) -> None:
        self.curve, self.tokens = Concentration(percents), torch.ones(0, dtype=torch.bool)

    def look(self, memory: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(memory, Memory)
        op, options = _SLOT_OPS[memory.activation]
        x = args[0].detach()[self.tokens]
        for weights, visible in weight_blocks(
            op, x, memory.keys, bias=memory.key_bias, scale=1 / memory.temperature, **options
        ):
            self.curve.update(weights, visible)


@contextmanager
def _watched(memory: KeyValueMemory, percents: Sequence[float]) -> Iterator[_Slots]:
    slots = _Slots(percents)
    hook = memory.register_forward_pre_hook(slots.look)
    try:
        yield slots
    finally:
        hook.remove()


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
