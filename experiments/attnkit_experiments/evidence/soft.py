"""The claims of Lu et al. 2021."""

from __future__ import annotations

from functools import partial

from attnkit_experiments.evidence.checks import (
    Compare,
    Diverges,
    Everywhere,
    Growth,
    Rows,
    alike,
    as_good,
    better,
    lower,
    worse,
)
from attnkit_experiments.evidence.claim import Claim
from attnkit_experiments.evidence.runs import Record

OTHERS = ("linformer", "performer", "nystromformer")
LINEAR = (*OTHERS, "soft")
MODES = ("predicting", "training")


def number(row: Record, key: str) -> float | None:
    return float(row[key]) if row[key] else None


def off(row: Record, ours: str, paper: str, factor: float) -> float | None:
    """What a counted number has more than the paper's."""
    counted, published = number(row, ours), number(row, paper)
    return None if counted is None or published is None else factor * counted - published


CLAIMS = (
    Claim(
        "SOFT is as accurate as softmax",
        "Table 1, §4.2",
        "In one backbone SOFT is at least as accurate as the Transformer (79.3 to 79.1; here: 0.05 nats of test "
        "loss at most above).",
        "002-table1",
        (as_good("soft", "transformer"),),
    ),
    Claim(
        "SOFT is the most accurate linear method",
        "Table 1, §4.2",
        "SOFT is more accurate than Linformer, Performer and Nyströmformer.",
        "002-table1",
        tuple(better("soft", name) for name in OTHERS),
    ),
    Claim(
        "linear methods halve the multiply-adds",
        "Table 1, §4.2",
        "Published models with linear methods have half of the Transformer's FLOPs (counted here: below 0.7).",
        "002-table1",
        tuple(
            Compare(name, "transformer", "full_multiply_adds_without_inverse", high=-0.3, relative=True)
            for name in LINEAR
        ),
    ),
    Claim(
        "linear methods save memory",
        "Table 1, §4.2",
        "Training takes less memory than with the Transformer. Ours never stores its weights, the paper's did.",
        "002-table1",
        tuple(lower(name, "transformer", "full_memory", relative=True) for name in LINEAR),
    ),
    Claim(
        "SOFT trains more slowly than Linformer and Performer",
        "Table 1, §4.2",
        "Newton's iteration makes training slower.",
        "002-table1",
        tuple(lower("soft", name, "full_training_rate", relative=True) for name in OTHERS[:2]),
    ),
    Claim(
        "five sizes have the published parameters",
        "Tables 2 and 3",
        "Tiny to Huge have 13, 24, 45, 64 and 87 M parameters (digits cut).",
        "002-table2",
        (
            Rows(
                "the published parameters",
                partial(off, ours="parameters", paper="paper_parameters", factor=1e-6),
                low=-1e-9,
                high=1.0,
                where={"counted": "ours"},
                keys=("parameters", "paper_parameters", "counted"),
            ),
        ),
    ),
    Claim(
        "five sizes have the published FLOPs",
        "Table 3, Fig. 1a",
        "Tiny to Huge have 1.9 to 16.3 GFLOPs (here: multiply-adds without Newton's iteration, within 0.35 G). "
        "Accuracies are cited.",
        "002-table3",
        (
            Rows(
                "the published FLOPs",
                partial(off, ours="without_inverse", paper="paper_flops", factor=1e-9),
                low=-0.35,
                high=0.35,
                where={"counted": "ours"},
                keys=("without_inverse", "paper_flops", "counted"),
            ),
        ),
    ),
    Claim(
        "few landmarks are enough",
        "Table 4a, §4.4",
        "Accuracy hardly depends on the number of landmarks (78.9 to 79.3; here: test loss within 0.05 nats).",
        "002-table4",
        (alike("m*", "average_pool"),),
    ),
    Claim(
        "more landmarks cost memory",
        "Table 4a, §4.4",
        "Memory grows with the number of landmarks; here of the published model, with fewer than its 49.",
        "002-table4",
        (lower("m*", "average_pool", "full_memory", relative=True),),
    ),
    Claim(
        "average pooling samples as well as anything",
        "Table 4b, §4.4",
        "Average pooling is as accurate as convolution, random or biased sampling (here: 0.05 nats of test loss at "
        "most above).",
        "002-table4",
        tuple(as_good("average_pool", name) for name in ("convolution", "random", "biased")),
    ),
    Claim(
        "a convolution adds parameters",
        "Table 4b",
        "Tiny has 13.07 M parameters with landmarks by convolution, 12.96 M with the others. Counted.",
        "002-table4",
        (
            Everywhere("convolution", "full_parameters", low=13.065e6, high=13.075e6),
            *(
                Everywhere(name, "full_parameters", low=12.955e6, high=12.965e6)
                for name in ("average_pool", "random", "biased")
            ),
        ),
    ),
    Claim(
        "a pyramid is better than a plain stack",
        "Table 5a, §4.4",
        "Four stages are more accurate than layers of one width (82.2 to 80.1).",
        "002-table5",
        (better("pyramid", "no pyramid"),),
    ),
    Claim(
        "overlapping convolutions are better",
        "Table 5b, §4.4",
        "Patches that overlap are more accurate than those that do not (79.3 to 77.4).",
        "002-table5",
        (better("pyramid", "no overlap"),),
    ),
    Claim(
        "SOFT keeps up on ListOps",
        "Table 6, §4.5",
        "SOFT is as accurate as the Transformer (37.4 to 37.1; here: 0.05 nats of test loss at most above).",
        "002-table6",
        (as_good("soft", "transformer"),),
        task="listops",
    ),
    Claim(
        "Performer and Reformer fail on ListOps",
        "Table 6",
        "They are far below the Transformer (18.8 and 19.1 to 37.1; here: 5 points), near the commonest answer.",
        "002-table6",
        tuple(Compare(method, "transformer", "accuracy", high=-0.05) for method in ("performer", "reformer")),
        task="listops",
    ),
    Claim(
        "SOFT is behind on text",
        "Table 6, §4.5",
        "On reviews, byte by byte, SOFT is less accurate than the Transformer (63.5 to 65.0).",
        "002-table6",
        (worse("soft", "transformer"),),
        task="text",
        needs=("task=text",),
    ),
    Claim(
        "SOFT is ahead on pixels in a row",
        "Table 6, §4.5",
        "On images as sequences SOFT is more accurate than the Transformer (46.9 to 38.2).",
        "002-table6",
        (better("soft", "transformer"),),
        task="image",
        needs=("task=image",),
    ),
    Claim(
        "memory grows linearly",
        "Fig. 1b, §4.2",
        "Memory of SOFT and of three other linear methods grows with n (here: exponent below 1.1).",
        "002-fig1b",
        tuple(
            Growth({"method": name, "mode": mode}, "bytes", "tokens", "bytes", high=1.1)
            for name in LINEAR
            for mode in MODES
        ),
    ),
    Claim(
        "a Transformer's memory grows quadratically",
        "Fig. 1b, §4.2",
        "With weights as a matrix it grows faster than linearly (here: exponent above 1.5).",
        "002-fig1b",
        tuple(Growth({"method": "transformer", "mode": mode}, "bytes", "tokens", "bytes", low=1.5) for mode in MODES),
    ),
    Claim(
        "SOFT's heads follow object and surroundings",
        "Fig. 3, §4.3",
        "Heat maps of four methods, judged by eye.",
        "002-fig3",
    ),
    Claim(
        "Newton's iteration converges in 20 steps",
        "Fig. 4, §4.4",
        "In every stage the residual falls to nothing within 20 steps (here: its median below 1 %, with the authors' "
        "options).",
        "002-fig4",
        (Everywhere("official", "residuals_median", high=0.01),),
    ),
    Claim(
        "it converges from α = 2/‖A‖₁² too",
        "Theorem 1, Algorithm 2",
        "The same with the options that the paper prints.",
        "002-fig4",
        (Everywhere("paper", "residuals_median", high=0.01),),
    ),
    Claim(
        "the full kernel does not converge",
        "§3.1",
        "With the Gaussian kernel between all tokens training diverges.",
        "002-kernel",
        (Diverges("kernel"),),
    ),
    Claim(
        "the full kernel is worse than its decomposition",
        "§3.1",
        "Where it trains, the full kernel is less accurate than SOFT.",
        "002-kernel",
        (worse("kernel", "soft"),),
    ),
    Claim(
        "α by halving differs from 2/‖A‖₁²",
        "§3.2",
        "The smallest n that holds the printed inequality gives an α that converges faster. As printed, n is 0 or does "
        "not exist.",
        "002-halving",
        (Rows("halving changes α", partial(number, key="n"), low=0.5, keys=("n",)),),
    ),
    Claim(
        "random sampling is sensitive to m",
        "§3.2",
        "From 1 landmark to 16 test loss falls more with random tokens than with average pooling.",
        "002-sampling",
        (Compare("random-m16", "random-m1", high=0.0, beyond=("average_pool-m16", "average_pool-m1")),),
    ),
)
