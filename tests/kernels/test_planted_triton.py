"""Bugs that are planted in the Triton kernels, which are interpreted: the kit finds each of them."""

import pytest

from attnkit_conformance import core

from .interpreted import worker
from .selection import case_of

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.emulated

PLANTED = "tests.kernels.planted_in_interpreter"
WRONG, SPLIT, SEGMENTED = (f"{PLANTED}:wrong{kind}" for kind in ("", "_split", "_segmented"))
STATISTICS = "attention_with_statistics"
WILD = {"bound", "nonfinite"}


@pytest.mark.parametrize(
    ("target", "replaced", "planted", "op", "dtype", "scene", "checks"),
    [
        (WRONG, "pointwise.visible_pairs", "every_pair", "pointwise_attention", "float32", "causal-padded", WILD),
        (WRONG, "pointwise.key_blocks", "whole_blocks", "pointwise_attention", "float32", "cross", {"bound"}),
        (
            WRONG, "pointwise.valid_keys", "one_key_more", "pointwise_attention", "float32", "causal-padded",
            {"null_rows", *WILD},
        ),
        (
            WRONG, "pointwise.spreads", "never_spreads", "pointwise_attention", "float32", "blocks-masked",
            {"nonfinite"},
        ),
        (WRONG, "rows.spreads", "never_spreads", "softmax_attention", "float32", "blocks-masked", {"nonfinite"}),
        (WRONG, "pointwise.whole_sum", "products_alone", "gaussian_attention", "float32", "cross", {"bound"}),
        (WRONG, "distances.mean_of", "nowhere", "gaussian_attention", "float32", "offset", {"bound"}),
        (
            WRONG, "distances.visible_pairs", "every_pair", "gaussian_attention", "float32", "causal-padded",
            {"nonfinite"},
        ),
        (
            WRONG, "pointwise.products_of", "near_alone", "gaussian_attention", "bfloat16",
            "pair.shape=13x7,width=1x1,batch=none,values=large", {"bound"},
        ),
        (WRONG, "pointwise.whole_tokens", "near_tokens", "gaussian_attention", "float16", "causal-padded", {"bound"}),
        (WRONG, "whole_head.seen_keys", "without_the_last_key", "pointwise_attention", "bfloat16", "cross", {"bound"}),
        (
            WRONG, "whole_head.visible_pairs", "one_key_later", "pointwise_attention", "bfloat16", "64x100-causal",
            {"bound"},
        ),
        (WRONG, "whole_head.gathered", "of_the_last_keys", "pointwise_attention", "bfloat16", "cross", {"bound"}),
        (WRONG, "statistics.logarithm", "no_logarithm", STATISTICS, "float32", "cross.pointwise_attention", {"bound"}),
        (
            WRONG, "pointwise.with_statistics", "output_alone", STATISTICS, "float32", "cross.pointwise_attention",
            {"bound"},
        ),
        (
            WRONG, "rows_statistics.load_stats", "with_a_lower_threshold", STATISTICS, "float32",
            "cross.sparsemax_attention", {"bound"},
        ),
        (
            WRONG, "rows_statistics.shrunk", "squares_as_they_were", STATISTICS, "float32", "cross.softmax_attention",
            {"bound"},
        ),
        (
            WRONG, "rows_statistics.shrunk", "spread_unmoved", STATISTICS, "float32", "cross.softmax_attention",
            {"bound"},
        ),
        (
            WRONG, "rows_gradients.with_statistics", "output_alone", STATISTICS, "float32", "cross.softmax_attention",
            {"bound"},
        ),
        (WRONG, "rows.rising", "one_step", "sparsemax_attention", "float32", "cross", {"bound"}),
        (WRONG, "rows.shrinkage", "never_shrunk", "softmax_attention", "float32", "cross", {"bound"}),
        (WRONG, "rows_gradients.means", "no_means", "entmax_attention", "float32", "cross", {"bound"}),
        (WRONG, "rows.scores", "unmasked_scores", "softmax_attention", "float32", "causal-padded", WILD),
        (WRONG, "softpick.first_maximum", "never_first", "softpick_attention", "float32", "causal-padded", {"bound"}),
        (WRONG, "softpick.first_maximum", "last_maximum", "softpick_attention", "float32", "kinks", {"bound"}),
        (
            WRONG, "rows.fade_of", "without_low_digits", "forgetting_attention", "float32",
            "long.log_forget=mixed,return_lse=True", {"bound"},
        ),
        (
            WRONG, "rows_gradients.store_tiles", "of_the_last_tile", "forgetting_attention", "float32",
            "long.log_forget=mixed,return_lse=True", {"bound"},
        ),
        (WRONG, "rows_gradients.store_crossing", "of_own_tiles", "forgetting_attention", "float32", "cross", {"bound"}),
        (SPLIT, "decoding.own_keys", "every_key", "pointwise_attention", "float32", "cross", WILD),
        (SPLIT, "decoding.packed_rows", "rows_of_the_first_head", "softmax_attention", "float32", "gqa-mask", WILD),
        (SPLIT, "decoding.exp", "unweighted", "softmax_attention", "float32", "cross", WILD),
        (WRONG, "tiles.own_sequence", "first_alone", "pointwise_attention_packed", "float32", "cross", WILD),
        (WRONG, "tiles.own_tokens", "one_token_less", "pointwise_attention_packed", "float32", "cross", WILD),
        (WRONG, "linear_tokens.own_sequence", "first_alone", "linear_attention_packed", "float32", "cross", WILD),
        (SEGMENTED, "linear.load_state", "forgotten", "linear_attention", "float32", "mqa-causal", {"bound"}),
        (SEGMENTED, "linear.load_state", "without_z", "linear_attention", "float32", "key-mask-1d", {"bound"}),
        (SEGMENTED, "linear.seen_keys", "unmasked_keys", "linear_attention", "float32", "key-mask-1d", WILD),
        (SEGMENTED, "linear.load_initial", "not_added", "linear_attention", "float32", "causal-padded", {"bound"}),
        (
            SEGMENTED, "linear.live_queries", "null_without_keys", "linear_attention", "float32", "causal-padded",
            {"bound"},
        ),
        (
            SEGMENTED, "linear_sweeps.load_rows", "without_delta", "linear_attention", "bfloat16", "blocks-causal",
            {"bound"},
        ),
        (
            SEGMENTED, "linear_sweeps.load_rows", "without_delta", "linear_attention", "bfloat16", "widest", {"bound"},
        ),
        (
            SEGMENTED, "linear_sweeps.load_tokens", "of_the_first_member", "linear_attention", "bfloat16", "mqa-causal",
            {"bound"},
        ),
        (
            SEGMENTED, "linear_sweeps.two_operands", "first_digits_alone", "linear_attention", "bfloat16",
            "far-values", {"bound"},
        ),
        (
            SEGMENTED, "linear_sweeps.two_operands", "first_digits_alone", "linear_attention", "float16",
            "far-values", {"bound"},
        ),
        (
            WRONG, "linear.level_at", "without_what_high_lacks", "linear_attention", "float32",
            "decay-mixed", {"bound"},
        ),
        (WRONG, "linear.fade_between", "never_fading", "linear_attention", "bfloat16", "decay-mixed", {"bound"}),
        (WRONG, "linear.left_over", "nothing", "linear_attention", "bfloat16", "causal-padded", {"bound"}),
        (WRONG, "linear.level_at", "of_the_first_key", "linear_attention", "float32", "decay-faint", {"bound"}),
        (WRONG, "linear.fade_between", "never_fading", "linear_attention", "float32", "decay-mixed", {"bound"}),
        (WRONG, "linear.gradient_gates", "of_no_later_chunk", "linear_attention", "float32", "decay-faint", {"bound"}),
        (WRONG, "linear_step.place", "of_the_first_head", "linear_attention_step", "float32", "state", WILD),
        (WRONG, "linear_features._faded", "never_faded", "performer_attention", "float32", "blocks-causal", {"bound"}),
        (WRONG, "linear_features._faded", "of_all_keys", "performer_attention", "float32", "blocks-causal", {"bound"}),
        (WRONG, "linear_features.call_of", "with_eps", "efficient_attention", "float32", "cross", {"bound"}),
        (WRONG, "newton.product", "one_product", "newton_inverse", "float32", "random", {"bound"}),
        (WRONG, "newton.step", "half_step", "newton_inverse", "float32", "random", {"bound"}),
        (WRONG, "newton.start_gradient", "constant_norm", "newton_inverse", "float32", "init-scale", {"bound"}),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(
    target: str, replaced: str, planted: str, op: str, dtype: str, scene: str, checks: set[str]
) -> None:
    adapter = worker(target, REPLACED=replaced, PLANTED=planted)
    result = core.check(adapter, case_of(adapter, op, (dtype,), scene))
    adapter.close()
    assert result.checks & checks, result.message


def test_three_tf32_products_are_enough() -> None:
    """Of operands that are rounded as `cvt.rna` does, which the compiler puts before them."""
    adapter = worker(WRONG, REPLACED="newton.product", PLANTED="three_products")
    result = core.check(adapter, case_of(adapter, "newton_inverse", ("float32",), "not-symmetric"))
    adapter.close()
    assert result.status == "pass", result.message
