"""The claims of Wortsman et al. 2023, and the next checks that a summary of it proposes."""

from __future__ import annotations

from attnkit_experiments.evidence.checks import (
    Everywhere,
    Exact,
    Level,
    alike,
    as_good,
    better,
    higher,
    lower,
    worse,
)
from attnkit_experiments.evidence.claim import Claim

BITS = 0.05
"""Our margin of bits per byte where the paper says "matches" without one."""

ACTIVATIONS = ("relu_squared", "gelu", "softplus", "identity")
SQUARED = ("activations=relu_squared",)
SEVEN = ("activations=relu,relu_squared,gelu,softplus,identity",)

CLAIMS = (
    Claim(
        "relu/L keeps up with softmax",
        "Fig. 1, §4",
        "At any compute relu over the length is as accurate as softmax (here: 0.05 nats of test loss at most above).",
        "000-fig1",
        (as_good("*-relu-alpha1", "*-softmax"),),
    ),
    Claim(
        "dividing by the length is needed",
        "abstract, Fig. 2",
        "Relu without a factor is less accurate than with α = 1.",
        "000-fig2",
        (better("relu-alpha1", "relu-alpha0"),),
    ),
    Claim(
        "the best α is near 1",
        "Fig. 2, §4",
        "Relu is most accurate with α close to 1, better than with ½.",
        "000-fig2",
        (better("relu-alpha1", "relu-alpha0.5"),),
    ),
    Claim(
        "no activation is clearly best",
        "Fig. 2, §4",
        "At α = 1 other activations are as accurate as relu (here: within 0.05 nats of test loss).",
        "000-fig2",
        tuple(alike(f"{name}-alpha1", "relu-alpha1") for name in ACTIVATIONS[:3]),
        needs=SEVEN,
    ),
    Claim(
        "without an activation accuracy is lost",
        "§2, note 1",
        "The identity, which makes attention linear, is less accurate than softmax.",
        "000-fig2",
        (worse("identity-alpha1", "softmax"),),
        needs=SEVEN,
    ),
    Claim(
        "mean weights scale as L⁻ᵅ",
        "§3",
        "Before training the mean weight falls with the length as L⁻ᵅ, as softmax's for α = 1. Exact at any size.",
        "000-fig2",
        (Exact("weights"),),
    ),
    Claim(
        "qk-layernorm matters little",
        "Fig. 3, §4",
        "Without qk-layernorm accuracy hardly changes for small models (here: test loss within 0.05 nats).",
        "000-fig3",
        (alike("relu-*-nonorm", "relu-*-norm"),),
    ),
    Claim(
        "qk-layernorm matters little for relu² too",
        "Fig. 3, §4",
        "The figure is of relu and of relu²; without qk-layernorm accuracy hardly changes for this one either (here: "
        "test loss within 0.05 nats).",
        "000-fig3",
        (alike("relu_squared-*-nonorm", "relu_squared-*-norm"),),
        needs=SQUARED,
    ),
    Claim(
        "a gate does not replace the factor",
        "Fig. 4, §4",
        "With a gate too, α = 1 is more accurate than α = 0.",
        "000-fig4",
        (better("relu-alpha1-gate", "relu-alpha0-gate"),),
    ),
    Claim(
        "a gate does not replace the factor of relu² either",
        "Fig. 4, §4",
        "The figure is of relu and of relu²; with a gate α = 1 is more accurate than α = 0 for this one too.",
        "000-fig4",
        (better("relu_squared-alpha1-gate", "relu_squared-alpha0-gate"),),
        needs=SQUARED,
    ),
    Claim(
        "a gate costs time",
        "Fig. 4, §4",
        "A gate needs more core hours: 9.3 % for S/8 in the paper.",
        "000-fig4",
        (higher("relu-alpha1-gate", "relu-alpha1", "step_ms", relative=True),),
    ),
    Claim(
        "relu is faster than softmax",
        "§1",
        "Softmax is costly for its exponentials and sums; a step of training takes less time with relu.",
        "000-fig1",
        (lower("*-relu-alpha1", "*-softmax", "step_ms", relative=True),),
    ),
    Claim(
        "a learned scale makes up for α = 0",
        "§5, an open question",
        "A scale that starts at α = 0 and is learned comes to what α = 1 reaches (here: 0.05 nats of test loss at most "
        "above).",
        "000-learned",
        (as_good("relu-alpha0-*", "relu-alpha1"),),
    ),
    Claim(
        "a learned α moves to 1",
        "§5, an open question",
        "An α that starts at 0 and is learned ends nearer to 1 than to 0.",
        "000-learned",
        (Level("relu-alpha0-alpha-*", "learned", low=0.5),),
    ),
    Claim(
        "learning the scale improves on α = 1",
        "§5, an open question",
        "A scale that starts at α = 1 and is learned is more accurate than the fixed one.",
        "000-learned",
        (better("relu-alpha1-*", "relu-alpha1"),),
    ),
    Claim(
        "what L⁻ᵅ does before training is exact",
        "next checks: long sequences",
        "Up to 16,384 tokens row sums go as L¹⁻ᵅ and variances as L¹⁻²ᵅ (here: within 5 standard errors).",
        "000-lengths",
        (Everywhere("*", "row_sum_errors", high=5.0), Everywhere("*", "variance_errors", high=5.0)),
    ),
    Claim(
        "the factor is needed at every length",
        "next checks: long sequences",
        "In a causal language model of any length α = 1 has fewer bits per byte than α = 0 (here: after 300 steps).",
        "000-lengths",
        (better("L*-relu-alpha1", "L*-relu-alpha0"),),
    ),
    Claim(
        "α beyond 1 does not help early in training",
        "next checks: α to 2, long sequences",
        "At any length α = 1 has fewer bits per byte than 1.5 and 2 (here: after 300 steps).",
        "000-lengths",
        (better("L*-relu-alpha1", "L*-relu-alpha1.5"), better("L*-relu-alpha1", "L*-relu-alpha2")),
    ),
    Claim(
        "relu/n keeps up with softmax in causal language models",
        "next checks: language models",
        "Bits per byte are those of softmax (here: 0.05 at most above).",
        "000-causal",
        (as_good("relu-alpha1", "softmax", BITS),),
    ),
    Claim(
        "causal language models need the factor",
        "next checks: language models",
        "α = 1 has fewer bits per byte than α = 0.",
        "000-causal",
        (better("relu-alpha1", "relu-alpha0"),),
    ),
    Claim(
        "α beyond 1 does not help",
        "next checks: α to 2",
        "In causal language models α = 1 has fewer bits per byte than 1.5 and 2.",
        "000-causal",
        (better("relu-alpha1", "relu-alpha1.5"), better("relu-alpha1", "relu-alpha2")),
    ),
    Claim(
        "relu/n keeps up with softmax in masked language models",
        "next checks: language models",
        "Bits per masked byte are those of softmax (here: 0.05 at most above).",
        "000-masked",
        (as_good("relu-alpha1", "softmax", BITS),),
    ),
    Claim(
        "the gain of time is real",
        "limitations: wall-clock time",
        "A step of a masked language model takes less time with relu than with softmax.",
        "000-masked",
        (lower("relu-alpha1", "softmax", "step_ms", relative=True),),
    ),
)
