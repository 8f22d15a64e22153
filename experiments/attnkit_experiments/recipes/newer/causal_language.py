"""The variants of 2023 to 2026 in the causal language model of 000-causal, beside softmax, relu and two floors.

Source: the papers of the variants (docs/semantics.md), each of which compares its own with softmax in a larger model.
Expected: papers report language models with sinks, scalable softmax, softpick and stick-breaking that are about as good
    as with softmax, forgetting gates better ones; linear attention worse, less so with decays and with the delta rule.
Settings: those of 000-causal; `methods` are keys of `language.methods.METHODS`. Layers have what their op needs, no
    convolutions and output gates; learned numbers start as softmax does where that can be (a sink at 0).
Cost: smoke under a minute on 2 CPU cores; cpu (16 methods, 3 seeds) about 9 hours on 2 CPU cores
    (estimated), of which forgetting gates are a ninth and kimi_delta a seventh.
Command: python -m experiments run 005-causal --preset cpu --data TEXT --out runs/newer
"""

from __future__ import annotations

from attnkit_experiments.language.domain import DOMAIN
from attnkit_experiments.language.methods import MethodStudy, variants
from attnkit_experiments.recipes.relu_vit.language import SCALES
from attnkit_experiments.study.recipe import Recipe, presets

RECIPE = Recipe(
    id="005-causal",
    title="Variants of 2023 to 2026 in a causal language model",
    shows="bits per byte with sinks, scalable softmax, softpick, stick-breaking, forgetting gates, decays and delta "
    "rules, beside softmax",
    source="the papers of the variants, in a model of ours",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        {name: SCALES[name] for name in ("smoke", "cpu")},
        {"smoke": {"steps": 3}, "cpu": {"steps": 8000}},
        {"cpu": "about 9 hours, 2 CPU cores (estimated)"},
    ),
    variants=variants,
    deviations=(
        "The papers train models of 100 million parameters and more on billions of tokens; this one has 230,000, on "
        "bytes.",
        "Tokens are bytes, of which the last tenth of each file is test.",
        "All methods have learned positions, qk-layernorm, and the optimiser and rate of 000-causal; none is tuned.",
        "Published layers of linear attention and of the delta rule have convolutions of four tokens and output "
        "gates, which are left out here.",
    ),
)
