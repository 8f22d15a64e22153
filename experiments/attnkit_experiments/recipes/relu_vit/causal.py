"""L^-alpha·h in a causal language model: does what Wortsman et al. 2023 find for images hold for text?

Source: the next checks that the summary of "Replacing softmax with ReLU in Vision Transformers" proposes: language
    models, other architectures.
Expected: nothing is published. What can be checked: bits per byte near those of softmax at alpha 1, and worse at 0.
Cost: smoke under a minute on 2 CPU cores; cpu about 2 hours on 2 CPU cores; small under 8 minutes on one H200
    (estimated, not measured); paper and billion on 8 H100 (predicted, see docs/experiments.md): 7 minutes and 6.5 hours
    a variant and seed, if there were nothing but products of matrices and attention.
Command: python -m experiments run 000-causal --preset cpu --data TEXT --out runs/causal; on 8 GPUs, with TOKENS from
    prepare text: torchrun --nproc-per-node 8 -m experiments run 000-causal --preset billion --sharding fsdp
    --data TOKENS --out runs/billion
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.language.domain import DOMAIN, LanguageStudy
from attnkit_experiments.recipes.relu_vit.language import DEVIATIONS, OF_TOKENS
from attnkit_experiments.recipes.relu_vit.presets import beside_softmax, grid_with_floor
from attnkit_experiments.study.recipe import Recipe, Variant, presets


@dataclass(frozen=True)
class Study(LanguageStudy):
    """`activations` × `alphas`; `softmax`: whether it is there to compare with."""

    activations: tuple[str, ...] = ("relu",)
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
    softmax: bool = True


def variants(study: Study) -> tuple[Variant, ...]:
    grid = grid_with_floor(study.activations, study.alphas)
    return beside_softmax(grid) if study.softmax else grid


RECIPE = Recipe(
    id="000-causal",
    title="L⁻ᵅ·h in a causal language model",
    shows="bits per byte of causal point-wise attention divided by the number of visible keys, beside softmax",
    source="a next check of Wortsman et al. 2023",
    domain=DOMAIN,
    presets=presets(
        Study,
        OF_TOKENS,
        {
            "smoke": {"alphas": (1.0,)},
            "cpu": {"steps": 8000, "alphas": (0.0, 0.5, 1.0, 1.5, 2.0)},
            "small": {"activations": ("relu", "relu_squared", "sigmoid"), "seeds": (0,)},
        },
        {
            "cpu": "about 2 hours, 2 CPU cores",
            "small": "under 8 minutes, one H200 (estimated)",
            "paper": "7 minutes of 8 H100 a variant and seed at least (predicted)",
            "billion": "6.5 hours of 8 H100 a variant and seed at least (predicted)",
        },
    ),
    variants=variants,
    deviations=DEVIATIONS,
)
