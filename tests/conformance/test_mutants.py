"""Bugs of the kind that people write die in the quick profile: options that one path forgets beside another, bounds
off by one, factors left out. Each is planted into the generic bodies of attnkit, and NumPy is judged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnkit._core import dropout, mask, quadratic
from attnkit.ops import gaussian, pointwise, softmax
from attnkit.ops.linear import chunks, decay, rule, states, sums
from attnkit_conformance import core, judge
from attnkit_conformance.adapters.numpy import adapters
from tests.conformance.planting import plant

Function = Callable[..., Any]
SOFTMAX, POINTWISE, RELUFORMER, SIGMOID, GAUSSIAN = (
    f"{name}_attention" for name in ("softmax", "pointwise", "reluformer", "sigmoid", "gaussian")
)
LINEAR, COSINE, PERFORMER, EFFICIENT = (f"{name}_attention" for name in ("linear", "cosine", "performer", "efficient"))
PAIRS, PREPARE = mask.Visibility.between, quadratic.prepare
NUMBERS = {"bound", "nonfinite", "null_rows"}  # what is wrong with a result, not with a call
MUTANTS: tuple[tuple[str, str, Function, str, str], ...] = (
    ("a mask is forgotten under causality", SOFTMAX, PAIRS, "if self.mask is not None:",
     "if self.mask is not None and not self.causal:"),
    ("a mask is forgotten beside a window", SIGMOID, PAIRS, "if self.mask is not None:",
     "if self.mask is not None and not self.window:"),
    ("a window is forgotten under causality", POINTWISE, PAIRS, "if left is not None:",
     "if left is not None and not self.causal:"),
    ("key lengths are forgotten beside a query mask", RELUFORMER, PAIRS, "if n is not None:",
     "if n is not None and self.query_mask is None:"),
    ("a query mask is forgotten beside a mask", SOFTMAX, PAIRS, "if self.query_mask is not None:",
     "if self.query_mask is not None and self.mask is None:"),
    ("masks are joined by or", SOFTMAX, PAIRS, "pairs & term", "pairs | term"),
    ("a window reaches one key too far to the left", SOFTMAX, PAIRS, "(shift - left)", "(shift - left - 1)"),
    ("a window reaches one key too far to the right", SOFTMAX, PAIRS, "(shift + right)", "(shift + right + 1)"),
    ("a window lacks a key on the left", RELUFORMER, PAIRS, "j >= i", "j > i"),
    ("causality is strict", SIGMOID, PAIRS, "j <= (i if", "j < (i if"),
    ("upper left is taken for lower right", SOFTMAX, PAIRS, 'i if self.causal == "upper_left" else i + shift',
     "i + shift"),
    ("lower right is taken for upper left", SOFTMAX, PAIRS, 'i if self.causal == "upper_left" else i + shift', "i"),
    ("key lengths count one key too many", SOFTMAX, PAIRS, "j < (n if", "j <= (n if"),
    ("a dropout mask is read where nothing is visible", SOFTMAX, PREPARE,
     "drop = None if drop is None else xp.where(pairs, drop, 0.0)", "pass"),
    ("dropout by seed is not scaled", SOFTMAX, PREPARE, " * (1.0 / (1.0 - p))", ""),
    ("dropout by seed is divided by p", POINTWISE, PREPARE, "1.0 / (1.0 - p)", "1.0 / p"),
    ("padded keys are not replaced beside a query mask", SOFTMAX, PREPARE, "if not all_seen:",
     "if not all_seen and visibility.query_mask is None:"),
    ("the bias is forgotten beside dropout", SOFTMAX, quadratic.scores, "if a.bias is None",
     "if a.bias is None or a.drop is not None"),
    ("a negative scale loses its sign", SIGMOID, quadratic.scores, "a.q * a.multiplier", "a.q * abs(a.multiplier)"),
    ("weights are dropped in the output only", SOFTMAX, quadratic.product_gradients,
     "dw, dropped = dw * a.drop, w * a.drop", "dropped = w * a.drop"),
    ("dk is not scaled", POINTWISE, quadratic.score_gradients, "ds.mT @ (a.q * a.multiplier)", "ds.mT @ a.q"),
    ("heads of a group are not added up", SOFTMAX, quadratic.sum_to, "groups = (shape[-3], g.shape[-3] // shape[-3])",
     "groups = (g.shape[-3] // shape[-3], shape[-3]); return g[..., :shape[-3], :, :]"),
    ("dropout counts heads for items", SOFTMAX, dropout.keep_mask, "head[..., None, None], item[..., None, None]",
     "item[..., None, None], head[..., None, None]"),
    ("softmax has no maximum", SOFTMAX, softmax.exponentials, "u = xp.exp(s - m)", "m = 0.0 * m; u = xp.exp(s)"),
    ("the maximum runs over hidden scores", SOFTMAX, softmax.exponentials, "s = xp.where(a.pairs, s, -math.inf)",
     "h = a"),
    ("rows without a finite score divide by 0", SOFTMAX, softmax.inverse, "if _may_be_empty(a)", "if False"),
    ("lse forgets its maximum", SOFTMAX, softmax.logsumexp, "e.m + log_z", "log_z"),
    ("a length of all keys is that of visible ones", POINTWISE, mask.row_length, 'keys if length == "all" else count',
     "count"),
    ("a length of visible keys is that of all", SIGMOID, mask.row_length, 'keys if length == "all" else count', "keys"),
    ("gamma is ignored", RELUFORMER, pointwise.reluformer_options, "math.sqrt(2.0) / gamma", "math.sqrt(2.0)"),
    ("a gain is ignored without alpha", POINTWISE, pointwise.row_factor, "quadratic.number(xp, gain, a.dtype)",
     "quadratic.number(xp, gain if is_learned(alpha) or alpha else 1.0, a.dtype)"),
    ("a shift is ignored under a mask", POINTWISE, pointwise._shifted,
     "elif not (isinstance(shift, (int, float)) and shift == 0):",
     "elif not (isinstance(shift, (int, float)) and shift == 0) and a.pairs is None:"),
    ("a learned scale of heads is rounded to half", SOFTMAX, quadratic.number, "cast(xp, x, dtype)",
     "cast(xp, cast(xp, x, xp.float16), dtype)"),
    ("dscale lacks the last query", SOFTMAX, quadratic.score_gradients, "towards_q * a.q",
     "(towards_q * a.q)[..., :-1, :]"),
    ("dscale of distances forgets the keys", GAUSSIAN, gaussian.beside, "of_tokens[0] + of_tokens[1]", "of_tokens[0]"),
    ("dgain forgets the length", POINTWISE, pointwise.beside, " * of_length(xp, a, alpha, length)", ""),
    ("dalpha has the sign of dgain", POINTWISE, pointwise.beside, "-of_rows * quadratic", "of_rows * quadratic"),
    ("dgamma is that of the gain", RELUFORMER, pointwise.gradient_of_gamma, "-math.sqrt(2.0) / (wide * wide)", "1.0"),
    ("the log of the length is added", SIGMOID, pointwise._shifted, "s = s - log", "s = s + log"),
    ("features: a mask is forgotten under causality", LINEAR, PAIRS, "if self.mask is not None:",
     "if self.mask is not None and not self.causal:"),
    ("features: key lengths are forgotten under causality", EFFICIENT, states.parts_of, "keys, mask, key_lengths)",
     "keys, mask, None if causal else key_lengths)"),
    ("a state is forgotten beside a mask", LINEAR, sums.sums, "out + (m.x * m.before) @ m.state", "out"),
    ("a state is forgotten in dq beside a mask", PERFORMER, sums._pairs_backward, "(d @ m.state.mT) * m.before", "0.0"),
    ("a state is forgotten in dq", LINEAR, sums.sums_backward,
     "state = None if m.state is None else _faded_state(m).mT", "state = None"),
    ("a state lacks the keys that nobody sees", LINEAR, sums.call_of, "parts.valid if keeps else parts.seen",
     "parts.seen"),
    ("the scale is forgotten in dq", LINEAR, rule._outputs_backward,
     "grads.x if m.rule.scale == 1 else grads.x * m.rule.scale", "grads.x"),
    ("the denominator has no gradient", COSINE, sums.divided_backward, "-slope *", "0.0 *"),
    ("padding is in the gradient of a state", LINEAR, sums.state_backward, "chosen(xp, m.parts.valid, dvalues)",
     "dvalues + (0.0 if m.parts.valid is None else 1e-3)"),
    ("hidden tokens decay", LINEAR, sums._decayed, "m.parts.valid", "None"),
    ("a decay begins with the first token", LINEAR, chunks._sums_between, "_later(xp, g)", "_past(xp, g)"),
    ("a decay does not fade the state before a chunk", LINEAR, chunks.fading_sums, "(x * f.within)", "x"),
    ("a returned state does not fade", LINEAR, decay.until_end, "xp.exp(joined(xp, left, n))",
     "xp.exp(0.0 * joined(xp, left, n))"),
    ("a decay has no gradient through an initial state", LINEAR, decay.pull_until_end, "dg + of_first", "dg"),
    ("a decay has no gradient through whole chunks", LINEAR, chunks.pull_fading_sums, " + of_whole", ""),
    ("the slope forgets the shift", POINTWISE, pointwise.score_gradient, "_shifted(xp, s, a, length, shift)", "s"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "function", "old", "new"), [bug[1:] for bug in MUTANTS], ids=[bug[0] for bug in MUTANTS]
)
def test_a_planted_bug_dies_in_quick(
    op: str, function: Function, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generic = [adapter for adapter in adapters() if adapter.name in ("numpy-generic", "numpy-generic-explicit")]
    plant(monkeypatch, function, old, new)
    with np.errstate(all="ignore"):
        results = judge.judge(generic, "small", "not property and not error", ops=(op,))
        assert any(result.checks & NUMBERS for result in results)


def test_the_text_of_a_bug_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="holds 'gamma of' 0 times"):
        plant(monkeypatch, pointwise.reluformer_options, "gamma of", "")


def test_a_plant_is_gone_after_its_test() -> None:
    assert pointwise.reluformer_options(gamma=2.0)["gain"] == 2**0.5 / 2
    assert core.BY_NAME[RELUFORMER]
