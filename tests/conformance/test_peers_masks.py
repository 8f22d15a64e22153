"""What adapters of peers hide is what the definition hides (A3), in every form; and by what traits they are excused."""

from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core, judge
from attnkit_conformance.adapters.bases.arguments import of_keys, visible_pairs
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.peers.traits import traits
from attnkit_reference import softmax_attention_weights

OP, L, S = "softmax_attention", 5, 7
rng = np.random.default_rng(0)
Q, K = rng.standard_normal((2, 3, L, 4)), rng.standard_normal((2, 3, S, 4))
MASK = rng.random((2, 3, L, S)) < 0.6
OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": MASK}, {"mask": MASK[0, 0]}, {"mask": MASK[:, :1, :1]}, {"mask": MASK[0, 0, 0]}, {"mask": np.array(False)},
    {"causal": True}, {"causal": "upper_left"}, {"window": (1, None)}, {"window": (2**70, 0)}, {"window": (0, 2**63)},
    {"key_lengths": 4}, {"key_lengths": 0}, {"key_lengths": 2**70}, {"key_lengths": np.int8(3)},
    {"key_lengths": np.array(4, np.uint8)}, {"key_lengths": np.array([[2], [2**64 - 1]], np.uint64)},
    {"query_mask": MASK[..., 0]}, {"query_mask": MASK[0, 0, :, 0]},
    {"key_lengths": 5, "mask": MASK, "causal": True, "window": (3, 1), "query_mask": MASK[..., 1]},
)  # fmt: skip


def arguments(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays, with q and k, and parameters."""
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    return {"q": Q, "k": K, **arrays}, {name: x for name, x in options.items() if name not in arrays}


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_pairs_are_those_of_the_definition(options: dict[str, Any]) -> None:
    seen = visible_pairs(*arguments(options))
    assert seen is not None
    given = {name: int(x) if isinstance(x, np.integer) else x for name, x in options.items()}
    np.testing.assert_array_equal(np.broadcast_to(seen, MASK.shape), softmax_attention_weights(Q, K, **given) > 0)


def test_keys_are_what_mask_and_lengths_leave() -> None:
    seen = of_keys(*arguments({"key_lengths": 4, "causal": True, "query_mask": MASK[..., 0]}))
    np.testing.assert_array_equal(np.broadcast_to(seen, (1, S)), [[True] * 4 + [False] * 3])
    assert of_keys(*arguments({"causal": True})) is None


def failing(name: str) -> CaseResult:
    """A verdict on the first pair of options in which a row sees nothing, or on one without such rows."""
    for case in map(draw_case, core.samples(OP, "quick", ("float32",))):
        if "/pair." in case.id and ("null" in traits(case)) == (name == "null"):
            return CaseResult(case.id, "mine", OP, case.dtype, "fail")
    raise AssertionError(name)


def test_a_trait_excuses_what_fails_and_has_it() -> None:
    entries = {f"null:{OP}/*/pair.*": "rows without keys"}
    judge.refuse_unmatched({"mine": entries})
    assert judge.with_xfails(failing("null"), entries).status == "xfail"
    assert judge.with_xfails(failing("other"), entries).status == "fail"
    assert judge.with_xfails(failing("other"), {f"any:{OP}/*/pair.*": "everything"}).status == "xfail"
    right = CaseResult(failing("null").id, "mine", OP, "float32", "pass")
    assert judge.with_xfails(right, entries) is right
    with pytest.raises(ValueError, match=r"'softmax_attention/\*/nothing' matches no case"):
        judge.refuse_unmatched({"mine": {f"any:{OP}/*/nothing": "a reason"}})


def test_a_case_of_which_only_the_missing_output_had_a_cotangent_is_judged() -> None:
    class WithoutLse:
        name, dtypes, without = "without_lse", ("float32",), ("return_lse",)

    for case in map(draw_case, core.samples(OP, "quick", ("bfloat16",))):
        if case.params.get("return_lse") and set(case.cotangents) == {"lse"}:
            left = core.without_outputs(WithoutLse(), case)  # type: ignore[arg-type]
            assert set(left.cotangents) == {"o"}
            assert not np.any(left.cotangents["o"])
            assert left.cotangents["o"].shape == core.golden(left).outputs["o"].golden.shape
            return
    raise AssertionError("no case")
