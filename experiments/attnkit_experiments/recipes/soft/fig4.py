"""Figure 4 of Lu et al. 2021: how fast Newton's iteration finds the inverse, stage by stage.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Figure 4 and §4.4: ‖A A_k A − A‖₂ / ‖A‖₂ against k on
    Tiny, A the kernel between landmarks.
Expected: it converges within 20 steps in every stage. No number is printed. The matrix is that which a layer inverts:
    with the options of the authors' code A + 0.01·I, with those of the paper A.
Cost: smoke under a minute on 2 CPU cores; cpu (2 rows, one seed) about 10 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 25 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-fig4 --preset cpu --data IMAGES --out runs/fig4
"""

from __future__ import annotations

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES
from attnkit_experiments.soft.domain import DOMAIN, SoftStudy, row
from attnkit_experiments.study.recipe import Recipe, Variant, presets


def variants(study: SoftStudy) -> tuple[Variant, ...]:
    return (row("official", options="official"), row("paper", baseline="official", options="paper"))


RECIPE = Recipe(
    id="002-fig4",
    title="How Newton's iteration converges in each stage of SOFT",
    shows="residual of the inverse against the number of steps, before and after training",
    source="Lu et al. 2021, Figure 4",
    domain=DOMAIN,
    presets=presets(
        SoftStudy,
        SCALES,
        {"cpu": {"landmarks": 16, "stem_stride": 1, "seeds": (0,)}},
        {"cpu": "about 10 minutes, 2 CPU cores (estimated)"},
        full_scale=False,
    ),
    variants=variants,
    deviations=(
        *DEVIATIONS,
        "options=paper is equation 9 in all stages with Algorithm 2's α = 2/‖A‖₁², with which the iteration can fall "
        "to 0 (residual 1) where landmarks lie far apart. The alternative α of §3.2 (halving until ‖I − αAA‖₁ ≤ 1) is "
        "not here. Its last stage inverts the kernel of all tokens; it is not drawn.",
    ),
)
