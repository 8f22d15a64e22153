"""What *Transformers are RNNs*, a text without experiments, says of linear attention, as far as it can be tested."""

from __future__ import annotations

import math

from attnkit_experiments.evidence.checks import Growth, Level, Rows, as_good, lower, not_below
from attnkit_experiments.evidence.claim import Claim
from attnkit_experiments.evidence.runs import Record

COPIED = 0.05
"""Our margin of accuracy on repeated symbols."""

METHODS = ("linear", "cosine", "efficient", "linformer")
CAUSAL = ("linear", "cosine", "efficient", "performer")
TASKS = {
    "listops": ("ListOps", ()),
    "text": ("reviews, byte by byte", ("task=text",)),
    "image": ("pixels in a row", ("task=image",)),
}


def quality(task: str) -> Claim:
    name, needs = TASKS[task]
    return Claim(
        f"linear attention is usable: {name}",
        "several kinds of linear attention",
        "The text asks whether attention can do without softmax. Linear (elu + 1), 1 + cosine, efficient attention and "
        f"Linformer do as well on {name} (here: 0.05 nats of test loss at most above).",
        "003-sequences",
        tuple(as_good(method, "transformer") for method in METHODS),
        task=task,
        needs=needs,
    )


def kept(row: Record) -> float | None:
    """What a layer keeps for its backward pass, by the formula of its method."""
    return float(row["layer_bytes"]) / float(row["expected_bytes"]) if row["layer_bytes"] else None


def causal_change(row: Record) -> float | None:
    return float(row["causal_change"]) if row["causal_change"] else None


def keeps(method: str, text: str, low: float = -math.inf, high: float = math.inf) -> Rows:
    keys = ("method", "layer_bytes", "expected_bytes")
    return Rows(f"{method}: a layer keeps {text}", kept, low, high, where={"method": method}, keys=keys)


CLAIMS = (
    *map(quality, TASKS),
    Claim(
        "linear attention saves time",
        "taking softmax away",
        "Without softmax the cost falls from n² to n; here a step of training is shorter at the length of the run.",
        "003-sequences",
        tuple(lower(method, "transformer", "step_ms", relative=True) for method in METHODS),
        task="listops",
    ),
    Claim(
        "causal linear attention keeps what it read",
        "autoregressive generation",
        "Sums up to each token are all that linear attention knows of those before. It repeats a sequence as well as "
        "softmax (here: 5 points at most fewer symbols right).",
        "003-copying",
        tuple(not_below(method, "softmax", COPIED, "accuracy") for method in CAUSAL),
    ),
    Claim(
        "causal linear attention copies at all",
        "autoregressive generation",
        "It gets more symbols right than guessing among ten (here: above 15 %).",
        "003-copying",
        tuple(Level(method, "accuracy", low=0.15) for method in CAUSAL),
    ),
    Claim(
        "the state does not grow",
        "autoregressive generation",
        "Decoding needs a state of one size at any length; a cache of keys and values grows with it.",
        "003-decoding",
        (
            *(Growth({"method": name}, "bytes", "tokens", "bytes", low=-0.01, high=0.01) for name in CAUSAL),
            Growth({"method": "softmax"}, "bytes", "tokens", "bytes", low=0.99, high=1.01),
        ),
    ),
    Claim(
        "a token costs the same at any length",
        "autoregressive generation",
        "Time of a token does not grow with those before (here: exponent below 0.1), with a cache it does (above 0.3).",
        "003-decoding",
        (
            *(Growth({"method": name}, "ms", "tokens", "ms", low=-0.1, high=0.1) for name in CAUSAL),
            Growth({"method": "softmax"}, "ms", "tokens", "ms", low=0.3),
        ),
    ),
    Claim(
        "states need not be kept",
        "memory of training",
        "Automatic differentiation of running sums keeps a state for each token, n·d·e numbers. Only the gradient of q "
        "needs states: summed again in the backward pass, they leave its output, n·e, as all that a layer keeps (here: "
        "1.1 times that at most).",
        "003-memory",
        (
            keeps("linear, running sums", "n·d·e numbers or more", low=0.99),
            keeps("linear, recomputed", "1.1·n·e numbers at most", high=1.1),
            keeps("linear", "1.1·n·e numbers at most", high=1.1),
        ),
    ),
    Claim(
        "Linformer cannot be causal",
        "Linformer",
        "Its projections mix all tokens before a query meets a key, so that later ones cannot be masked, while linear "
        "attention can hide them: no causal output changes by a bit with later tokens.",
        "003-future",
        (
            Rows(
                "linformer: earlier outputs change with later tokens",
                lambda row: float(row["change"]),
                low=0.01,
                where={"method": "linformer"},
                keys=("method", "change"),
            ),
            Rows(
                "linformer_attention refuses causal=True by name",
                lambda row: float(row["refused"].startswith("linformer_attention: ")),
                low=0.5,
                where={"method": "linformer"},
                keys=("method", "refused"),
            ),
            *(
                Rows(
                    f"{name}, causal: no bit changes",
                    causal_change,
                    low=-1e-30,
                    high=1e-30,
                    where={"method": name},
                    keys=("method", "causal_change"),
                )
                for name in CAUSAL
            ),
        ),
    ),
)
