"""L^-alpha at lengths from 64 to 16,384 and alpha from 0 to 2: what the factor does before training, and after some.

Source: the next checks that the summary of "Replacing softmax with ReLU in Vision Transformers" proposes: sequences of
    8,192 tokens and more, alpha beyond 1. The paper has 49 to 784 tokens and alpha from 0 to 1 (§3, Figure 2).
Expected: before training the row sum is L^(1-alpha)·E h and the output's variance L^(1-2·alpha)·E h² exactly, so that
    alpha = 1 alone keeps the first and alpha = ½ alone the second at every length. After training nothing is published.
Cost: smoke under a minute on 2 CPU cores; cpu about 40 minutes on 2 CPU cores (estimated); small about 10 minutes on
    one H200 (estimated, not measured); paper about 15 hours of one H200 a variant and seed at 8,192 (estimated).
Command: python -m experiments run 000-lengths --preset cpu --data TEXT --out runs/lengths
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.language.domain import DOMAIN, LanguageStudy
from attnkit_experiments.recipes.relu_vit.language import DEVIATIONS, SCALES
from attnkit_experiments.recipes.relu_vit.presets import beside_softmax, grid_with_floor
from attnkit_experiments.study.recipe import Recipe, Variant, presets

ALPHAS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
EXACT_AT = (64, 256, 1024, 4096, 8192, 16_384)


@dataclass(frozen=True)
class Study(LanguageStudy):
    """`activations` × `alphas` beside softmax at every one of `lengths`; the key length has no effect here."""

    lengths: tuple[int, ...] = (64, 256, 1024)
    activations: tuple[str, ...] = ("relu",)
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)


def variants(study: Study) -> tuple[Variant, ...]:
    if study.lengths:
        require_in("[2, inf)", lengths=study.lengths)
    grid = beside_softmax(grid_with_floor(study.activations, study.alphas))
    points = [each.at(f"L = {n:,}", f"L{n}-{{}}", length=n) for n in study.lengths for each in grid]
    return tuple(points) if points else grid


RECIPE = Recipe(
    id="000-lengths",
    title="L⁻ᵅ at long sequences and α to 2",
    shows="row sums and variances before training, measured and exact, and bits per byte against alpha by length",
    source="a next check of Wortsman et al. 2023",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {
            "smoke": {"lengths": (64, 256), "alphas": (0.0, 1.0, 2.0), "exact_at": EXACT_AT, "steps": 15},
            "cpu": {"exact_at": EXACT_AT, "seeds": (0,)},
            "small": {"lengths": (256, 1024, 4096, 8192), "alphas": ALPHAS, "exact_at": EXACT_AT, "steps": 300},
            "paper": {"lengths": (64, 256, 1024, 4096, 8192), "alphas": ALPHAS, "exact_at": EXACT_AT},
        },
        {
            "cpu": "about 40 minutes, 2 CPU cores (estimated)",
            "small": "about 10 minutes, one H200 (estimated)",
            "paper": "7 to 15 hours of one H200 a variant and seed (estimated)",
        },
    ),
    variants=variants,
    deviations=DEVIATIONS,
)
