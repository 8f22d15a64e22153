"""Decay of linear attention: token l multiplies what came before it by exp(g_l), g_l <= 0.

What is left of key j for the query at position p is exp(g_{j+1} + ... + g_p), each sum added up on its own. An argument
is one number, one for each head of k, or one for each token.
"""

from dataclasses import dataclass

import numpy as np

from attnkit_reference._check import Array, as_float, boolean, integers, number
from attnkit_reference._core import Scores, reduce_to
from attnkit_reference.linear.states import spread, state_leading, sums_after, sums_before


@dataclass(frozen=True)
class Decay:
    """The logarithms of one call, 0 at hidden tokens: those that mask (for every query) or key_lengths exclude."""

    g: Array  # (..., S) with the heads of q
    valid: Array  # (..., S)
    of_argument: Array  # the argument as it broadcasts to (..., S), with the heads of k
    shape: tuple[int, ...] | None  # of the argument, None for a number
    groups: int
    last: Array  # (L,): the position of each query

    def kept(self, keep: Array) -> Array:
        """The logarithms (..., S) with the heads of k, for a state of the keys `keep`."""
        return np.where(keep, self.of_argument, 0.0)

    def _until(self) -> Array:
        """Which tokens have come when a query sees, (L, S)."""
        past: Array = np.arange(self.g.shape[-1]) <= self.last[:, None]
        return past

    def fades(self) -> tuple[Array, Array]:
        """What is left for each query: of each key (..., L, S), and of an initial state (..., L, 1)."""
        g = np.where(self._until(), self.g[..., None, :], 0.0)
        return np.exp(sums_after(g)), np.exp(g.sum(axis=-1, keepdims=True))

    def of_pairs(self, through: Array) -> Array:
        """The gradient of g from those of the sums of pairs (..., L, S)."""
        dg: Array = np.sum(np.where(self._until(), sums_before(through), 0.0), axis=-2)
        return dg

    def of_rows(self, through: Array) -> Array:
        """The gradient of g from those of the sums of all tokens up to each query (..., L)."""
        dg: Array = np.sum(np.where(self._until(), through[..., None], 0.0), axis=-2)
        return dg

    def to_argument(self, of_outputs: Array, of_state: Array | None = None) -> Array:
        """The gradient of the argument: of_outputs (..., S) has the heads of q, of_state those of k."""
        assert self.shape is not None
        shape = (*self.of_argument.shape, 1)
        dg = reduce_to(np.where(self.valid, of_outputs, 0.0)[..., None], shape, self.groups)
        return (dg if of_state is None else dg + reduce_to(of_state[..., None], shape)).reshape(self.shape)


def decay_of(
    op: str,
    log_decay: object,
    sc: Scores,
    *,
    causal: object = False,
    mask: Array | None = None,
    key_lengths: object = None,
    **others: object,
) -> Decay:
    """The decay of a call with these arguments, which are checked elsewhere but for log_decay and causal."""
    if causal is not True:
        raise ValueError(f"{op}: log_decay needs causal; expected True, got {causal!r}")
    L, S = sc.visible.shape[-2:]
    shape = log_decay.shape if isinstance(log_decay, np.ndarray) else None
    of_argument = _argument(op, log_decay, state_leading(sc), S)
    valid: Array = np.ones(S, dtype=bool)
    if mask is not None:
        mask = boolean(op, "mask", mask)
        valid = valid & (mask.any(axis=-2) if mask.ndim > 1 else mask)
    if key_lengths is not None:
        valid = valid & (np.arange(S) < integers(op, "key_lengths", key_lengths)[..., None])
    wide = np.broadcast_to(of_argument, (*of_argument.shape[:-1], S))
    g = np.where(valid, spread(wide[..., None], sc.groups)[..., 0], 0.0)
    if np.any(g > 0):
        raise ValueError(f"{op}: log_decay; expected logarithms, at most 0, got {np.max(g)}")
    return Decay(g, valid, of_argument, shape, sc.groups, np.arange(L) + S - L)


def _argument(op: str, x: object, leading: tuple[int, ...], S: int) -> Array:
    """The argument as it broadcasts to (leading..., S): a number and one per head get a last axis of size 1."""
    if not isinstance(x, np.ndarray):
        value = number(op, "log_decay", x)
        if value > 0:
            raise ValueError(f"{op}: log_decay; expected a logarithm, at most 0, got {x!r}")
        return np.full(1, value)
    wide = as_float(op, "log_decay", x)
    heads = leading[-1:]
    if wide.ndim == 0 or (wide.ndim == 1 and heads):
        expected, fits = f"() or {heads}, a number for each head of k", wide.shape in ((), heads)
        own = wide[..., None]
    else:
        expected, own = f"a shape that broadcasts to {(*leading, S)}, a number for each token of k", wide
        of_leading = wide.shape[:-1]
        fits = wide.shape[-1] == S and len(of_leading) <= len(leading)
        fits = fits and all(a in (1, b) for a, b in zip(reversed(of_leading), reversed(leading), strict=False))
    if not fits:
        raise ValueError(f"{op}: log_decay does not fit; expected {expected}, got {wide.shape}")
    return own
