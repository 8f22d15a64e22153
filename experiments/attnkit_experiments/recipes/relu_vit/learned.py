"""Can the factor L^-1 be learned? An open question of Wortsman et al. 2023.

Source: "Replacing softmax with ReLU in Vision Transformers", §5: "unsure why the factor L^-1 improves performance or if
    this term could be learned".
Expected: nothing is published. A scale per layer or per head starts at L^-alpha and is learned, as the logarithm of a
    gain or as alpha itself (the same functions, other steps); its values stand beside the accuracies.
Cost: smoke under a minute on 2 CPU cores; cpu about 140 minutes on 2 CPU cores (estimated); small under 8 minutes on
    one H200 (estimated, not measured); paper and i1k as 000-fig2 for relu (estimated).
Command: python -m experiments run 000-learned --preset cpu --data IMAGES --out runs/learned
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attnkit_experiments.engine.errors import require_names
from attnkit_experiments.images.domain import DOMAIN
from attnkit_experiments.images.learned_scale import KINDS
from attnkit_experiments.recipes.relu_vit.big_vision import FIGURE_POINTS, augmented, paper_presets
from attnkit_experiments.recipes.relu_vit.presets import DEVIATIONS, SCALES, GridStudy, at_points, floor, pointwise_grid
from attnkit_experiments.study.recipe import Recipe, Variant, presets, softmax_variant


@dataclass(frozen=True)
class Study(GridStudy):
    """The grid with a fixed scale and with each of `kinds`; the key learned_scale has no effect here."""

    alphas: tuple[float, ...] = (0.0, 1.0)
    kinds: tuple[str, ...] = KINDS


def variants(study: Study) -> tuple[Variant, ...]:
    require_names("kinds", "learned scale", study.kinds, KINDS)
    every = [softmax_variant()]
    for each in pointwise_grid(study.activations, study.alphas):
        every.append(dataclasses.replace(each, series=f"{each.series}, fixed"))
        every += [
            dataclasses.replace(
                each,
                name=f"{each.name}-{kind}",
                series=f"{each.series}, {kind.replace('-', ' per ')}",
                baseline=each.name,
                changes={"learned_scale": kind},
            )
            for kind in study.kinds
        ]
    every += floor(study.activations)
    return augmented(study.augmentation, at_points(study.points, every))


RECIPE = Recipe(
    id="000-learned",
    title="A scale of the weights that is learned, from L⁻ᵅ on",
    shows="accuracy with fixed and learned scales of point-wise weights, and what was learned",
    source="an open question of Wortsman et al. 2023, §5",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {"smoke": {"steps": 15, "alphas": (1.0,), "kinds": ("gain-head", "alpha-layer")}},
        {"cpu": "about 140 minutes, 2 CPU cores (estimated)"},
    )
    | paper_presets(Study, hours=800, points=FIGURE_POINTS),
    variants=variants,
    deviations=(*DEVIATIONS, "The paper fixes the scale; learning it is its open question."),
)
