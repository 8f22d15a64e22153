"""What the papers of the variants of 2023 to 2026 say of language models and of recall, as far as it can be tested."""

from __future__ import annotations

from attnkit_experiments.evidence.checks import Level, as_good, better, not_below, worse
from attnkit_experiments.evidence.claim import Claim

BITS = 0.05
"""Our margin of bits per byte, as for relu."""
RECALLED = 0.05
"""Our margin of accuracy at queries."""

LIKE_SOFTMAX = ("sink", "ssmax", "softpick", "stick_breaking")
FADING = ("linear", "decay_heads", "decay_tokens", "gated_linear")

CLAIMS = (
    *(
        Claim(
            f"{name} keeps up with softmax",
            source,
            f"A language model {text} is about as good as with softmax (here: 0.05 bits per byte at most above).",
            "005-causal",
            (as_good(method, "softmax", BITS),),
        )
        for method, name, source, text in (
            ("sink", "softmax with a learned sink", "gpt-oss 2025", "whose heads learn a sink"),
            ("ssmax", "scalable softmax", "Nakanishi 2025", "whose scores grow with log n"),
            ("softpick", "softpick", "Zuhri et al. 2025", "with softpick"),
            ("stick_breaking", "stick-breaking", "Tan et al. 2024", "with stick-breaking attention"),
        )
    ),
    Claim(
        "forgetting gates improve on softmax",
        "Lin et al. 2025",
        "A language model has fewer bits per byte with a forget gate for each token and head.",
        "005-causal",
        (better("forgetting", "softmax"),),
    ),
    Claim(
        "linear attention falls behind softmax",
        "Yang et al. 2024, GLA",
        "Without softmax and without a decay a language model has more bits per byte.",
        "005-causal",
        (worse("linear", "softmax"),),
    ),
    Claim(
        "a decay improves linear attention",
        "Sun et al. 2023; Dao and Gu 2024",
        "Sums that fade, by a rate of the head or by a gate of the token, have fewer bits per byte than sums that do "
        "not.",
        "005-causal",
        (better("decay_heads", "linear"), better("decay_tokens", "linear")),
    ),
    Claim(
        "gates of tokens improve on a rate of the head",
        "Yang et al. 2024, GLA",
        "A decay that depends on the token has fewer bits per byte than one of the head, by one number or by one for "
        "each feature.",
        "005-causal",
        (better("decay_tokens", "decay_heads"), better("gated_linear", "decay_heads")),
    ),
    Claim(
        "the delta rule improves on linear attention",
        "Yang et al. 2024, DeltaNet",
        "A state that is corrected has fewer bits per byte than one that is added to.",
        "005-causal",
        (better("delta", "linear"),),
    ),
    Claim(
        "a gate improves the delta rule",
        "Yang et al. 2025, gated DeltaNet",
        "With a decay of each token the delta rule has fewer bits per byte.",
        "005-causal",
        (better("gated_delta", "delta"),),
    ),
    Claim(
        "softmax recalls",
        "Arora et al. 2024, Fig. 2",
        "Two layers of softmax find the values of almost all keys (here: above 95 %).",
        "005-recall",
        (Level("softmax", "accuracy", low=0.95),),
    ),
    Claim(
        "what is like softmax recalls as softmax does",
        "ours",
        "A sink, a slope, exact zeros or a stick take nothing away from recall (here: 5 points at most fewer values).",
        "005-recall",
        tuple(not_below(method, "softmax", RECALLED, "accuracy") for method in LIKE_SOFTMAX),
    ),
    Claim(
        "forgetting gates cost no recall",
        "Lin et al. 2025",
        "Gates can stay open where a task asks for it (here: 5 points at most fewer values than softmax).",
        "005-recall",
        (not_below("forgetting", "softmax", RECALLED, "accuracy"),),
    ),
    Claim(
        "states of one size recall less than softmax",
        "Arora et al. 2024, §4",
        "What is added to a state of one size is harder to distinguish than keys that are kept: at queries the loss is "
        "higher than that of softmax, with and without a decay.",
        "005-recall",
        tuple(worse(method, "softmax") for method in FADING),
    ),
    Claim(
        "the delta rule recalls more than sums",
        "Schlag et al. 2021; Yang et al. 2024, DeltaNet",
        "A state that gives up what it holds about a key before it writes has a lower loss at queries than states that "
        "are added to.",
        "005-recall",
        tuple(better("delta", method) for method in FADING),
    ),
    Claim(
        "gates cost the delta rule no recall",
        "Yang et al. 2025, gated DeltaNet",
        "With a decay of tokens or of features it finds as many values (here: 5 points at most fewer).",
        "005-recall",
        tuple(not_below(method, "delta", RECALLED, "accuracy") for method in ("gated_delta", "kimi_delta")),
    ),
    Claim(
        "without scores recall is a guess",
        "the floor",
        "A mean of all values before a query does not say which is that of its key (here: below 10 % are right; a "
        "guess among the values of a window is right in 4.2 %).",
        "005-recall",
        (Level("average", "accuracy", high=0.1),),
    ),
)
