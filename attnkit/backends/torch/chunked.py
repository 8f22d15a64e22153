"""Linear attention on the CPU, head by head in segments that stay in the cache, with explicit gradients.

With x = scale·φ(q), y = φ(k), c = v, and for gradients dn and dd those of num and raw, under causality

    num_i = Σ_{j ≤ i} (x_i·y_j) c_j                      raw_i = Σ_{j ≤ i} x_i·y_j
    dx_i = Σ_{j ≤ i} (dn_i·c_j + dd_i) y_j               dy_j = Σ_{i ≥ j} (dn_i·c_j + dd_i) x_i
    dc_j = Σ_{i ≥ j} (x_i·y_j) dn_i

The pairs of a chunk are multiplied out; all others meet in sums over whole chunks, S = Σ y_j c_jᵀ and z = Σ y_j of what
stands before a chunk, R = Σ x_i dn_iᵀ and r = Σ x_i dd_i of what stands behind it. The backward sweep starts at the
end; sums over the past are made again, segment by segment, and no chunk is kept. Memory: O((L + S)·d + segment).

Key j stands at position j, query i at position i + shift, and sees what is not behind it. Without causality the sums go
over all keys, or all queries, and no pairs are multiplied out.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.dispatch import Kernel
from attnkit._core.library import namespace
from attnkit._core.typing import Namespace
from attnkit.backends.torch.custom import Given, register
from attnkit.ops.linear import attention, cosine
from attnkit.ops.linear.scan import total
from attnkit.ops.linear.states import parts_of
from attnkit.ops.linear.sums import Features, Rule

ELEMENTS = 1 << 18  # of the sums before the chunks of a segment: 1 MiB in float32, the size of a core's cache
TOKENS = 512  # of a sequence: shorter ones take longer than by automatic differentiation
RULES: Mapping[str, Callable[..., Rule]] = {
    "linear_attention": partial(attention.rule, "linear_attention"),
    "cosine_attention": partial(cosine.rule, "cosine_attention"),
}
OPTIONS = ("feature_map", "normalize", "eps", "scale")  # of a rule
DIFFERENTIABLE = ("q", "k", "v")

# ---------------------------------------------------------------------------------------------- tokens


class Taken(NamedTuple):
    """Features of the tokens of a segment, in chunks (m, size, f); 0 at tokens that take no part."""

    values: Tensor
    features: Features
    keep: Tensor | None
    inside: slice  # of the tokens of the sequence
    offset: int  # of the first of them in the segment

    def own(self, x: Tensor) -> Tensor:
        """Numbers of a segment, for the tokens that there are."""
        return x.flatten(0, 1)[self.offset : self.offset + self.inside.stop - self.inside.start]

    def pulled(self, d: Tensor) -> Tensor:
        """The gradient of the tokens, for that of their features."""
        d = self.features.pull(_kept(self.own(d), self.keep))
        return _kept(d, self.keep)


def _kept(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x.masked_fill(~keep[:, None], 0.0)


def _as_given(xp: Namespace, x: Tensor) -> Features:
    return Features(x, lambda d: d)


class Sequence(NamedTuple):
    """Tokens (n, d) of one head, which of them take part, and the position of the first."""

    tokens: Tensor
    keep: Tensor | None
    start: int
    features: Callable[[Namespace, Tensor], Features] = _as_given

    def taken(self, xp: Namespace, dtype: torch.dtype, begin: int, end: int, size: int) -> Taken:
        """The tokens at the positions begin .. end."""
        n = len(self.tokens)
        first, last = (min(max(at - self.start, 0), n) for at in (begin, end))
        inside, offset = slice(first, last), max(0, self.start - begin) if last > first else 0
        keep = None if self.keep is None else self.keep[inside]
        features = self.features(xp, _kept(self.tokens[inside].to(dtype), keep))
        values = _kept(features.values, keep)
        behind = end - begin - offset - (last - first)
        if offset or behind:
            values = torch.nn.functional.pad(values, (0, 0, offset, behind))
        return Taken(values.unflatten(0, (-1, size)), features, keep, inside, offset)


class Head(NamedTuple):
    """One head of q, k and v, of do for gradients, and the rule of the op."""

    xp: Namespace
    rule: Rule
    dtype: torch.dtype
    q: Sequence
    k: Sequence
    v: Sequence
    do: Sequence | None
    size: int  # of chunks
    causal: bool

    def segments(self) -> Iterator[tuple[int, int]]:
        """Positions: whole chunks, as many as `ELEMENTS` allow."""
        f, e = (x.tokens.shape[-1] for x in (self.k, self.v))
        start = min(self.q.start, 0)
        stop = max(len(self.k.tokens), self.q.start + len(self.q.tokens))
        step = max(1, min(ELEMENTS // max(1, f * e), -(-(stop - start) // self.size))) * self.size
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            yield begin, begin + -(-(end - begin) // self.size) * self.size

    def taken(self, sequence: Sequence, segment: tuple[int, int]) -> Taken:
        return sequence.taken(self.xp, self.dtype, *segment, self.size)

    def queries(self, segment: tuple[int, int]) -> tuple[Taken, Tensor]:
        """q, and x."""
        q = self.taken(self.q, segment)
        return q, q.values if self.rule.scale == 1 else q.values * self.rule.scale


def _elu_plus_one(xp: Namespace, x: Tensor) -> Features:
    slope = x.clamp(max=0).exp_()
    return Features(x.clamp(min=0).add_(slope), lambda d: d * slope)


def _relu(xp: Namespace, x: Tensor) -> Features:
    return Features(x.relu(), lambda d: torch.ops.aten.threshold_backward(d, x, 0))


FEATURE_MAPS = {"elu_plus_one": _elu_plus_one, "relu": _relu}
"""Those of `linear.attention` in fewer passes: without automatic differentiation both sides of 0 may be evaluated."""


def _rule(op: str, given: Given) -> Rule:
    rule = RULES[op](**{name: given[name] for name in OPTIONS if name in given})
    if op != "linear_attention":
        return rule
    features = FEATURE_MAPS.get(given.get("feature_map", "elu_plus_one"))
    return rule if features is None else rule._replace(of_queries=features, of_keys=features)


# ---------------------------------------------------------------------------------------------- sums


def _running(each: Tensor, opening: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    """opening + the sums of what stands before each (behind it with `back`), and that of all."""
    sums = torch.empty_like(each)
    found, added = sums.unbind(), each.unbind()
    if back:
        found, added = found[::-1], added[::-1]
    found[0].copy_(opening)
    for n in range(1, len(found)):
        torch.add(found[n - 1], added[n - 1], out=found[n])
    return sums, found[-1] + added[-1]


def _column(x: Tensor) -> Tensor:
    """Σ over the tokens of each chunk, (m, f, 1)."""
    return x.sum(1).unsqueeze(-1)


Sums = tuple[Tensor, Tensor]  # S or R (f, e), and z or r (f, 1)


class Segment(NamedTuple):
    """num (m, size, e) and raw (m, size, 1) of a segment, and what they are made of."""

    num: Tensor
    raw: Tensor
    pairs: Tensor  # x yᵀ within chunks, 0 where the key is behind the query
    before: Sums  # of every chunk: (m, f, e) and (m, f, 1)
    after: Sums  # what the next segment starts from


def _segment(x: Tensor, y: Tensor, c: Tensor, opening: Sums) -> Segment:
    S, S_after = _running(torch.bmm(y.mT, c), opening[0])
    z, z_after = _running(_column(y), opening[1])
    pairs = torch.bmm(x, y.mT).tril_()
    raw = torch.bmm(x, z).add_(pairs.sum(-1, keepdim=True))
    num = torch.bmm(x, S).baddbmm_(pairs, c)
    return Segment(num, raw, pairs, (S, z), (S_after, z_after))


def _nothing(y: Tensor, c: Tensor) -> Sums:
    return y.new_zeros(y.shape[-1], c.shape[-1]), y.new_zeros(y.shape[-1], 1)


def _divided(h: Head, num: Tensor, raw: Tensor) -> Tensor:
    """o, which may take the place of num."""
    den, _, gives = h.rule.divide(h.xp, raw)
    return num.div_(den) if gives is None else num.div_(den.masked_fill(~gives, 1.0)).masked_fill_(~gives, 0.0)


def _divided_back(h: Head, num: Tensor, raw: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    """dn and dd."""
    den, slope, gives = h.rule.divide(h.xp, raw)
    if gives is not None:
        den, do = den.masked_fill(~gives, 1.0), do.masked_fill(~gives, 0.0)
    dn = do / den
    return dn, -slope * (dn * num).sum(-1, keepdim=True) / den


def _openings(h: Head) -> tuple[list[tuple[tuple[int, int], Sums]], Sums]:
    """Segments with the S and z of the keys before them, and those of all keys."""
    found, sums = [], None
    for segment in h.segments():
        y, c = (h.taken(sequence, segment).values for sequence in (h.k, h.v))
        sums = sums or _nothing(y, c)
        found.append((segment, sums))
        y, c = y.flatten(0, 1), c.flatten(0, 1)
        sums = sums[0] + total(h.xp, y, c), sums[1] + y.sum(0).unsqueeze(-1)
    assert sums is not None
    return found, sums


def attend_whole(h: Head, o: Tensor) -> None:
    """o (L, e) of one head without order."""
    _, (S, z) = _openings(h)
    for segment in h.segments():
        q, x = h.queries(segment)
        o[q.inside] = q.own(_divided(h, x @ S, x @ z)).to(o.dtype)


def pull_whole(h: Head, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients of one head without order: a pass over the queries, and one over the keys."""
    assert h.do is not None
    _, (S, z) = _openings(h)
    R, r = torch.zeros_like(S), torch.zeros_like(z)
    for segment in h.segments():
        q, x = h.queries(segment)
        dn, dd = _divided_back(h, x @ S, x @ z, h.taken(h.do, segment).values)
        rows = x.flatten(0, 1)
        R += total(h.xp, rows, dn.flatten(0, 1))
        r += total(h.xp, rows, dd.flatten(0, 1))
        dq[q.inside] += q.pulled((dn @ S.mT + dd @ z.mT) * h.rule.scale)
    for segment in h.segments():
        k, v = h.taken(h.k, segment), h.taken(h.v, segment)
        dk[k.inside] += k.pulled(v.values @ R.mT + r.mT)
        dv[v.inside] += v.pulled(k.values @ R)


def attend_causal(h: Head, o: Tensor) -> None:
    """o (L, e) of one head under causality."""
    sums = None
    for segment in h.segments():
        q, x = h.queries(segment)
        y, c = h.taken(h.k, segment).values, h.taken(h.v, segment).values
        found = _segment(x, y, c, sums or _nothing(y, c))
        sums = found.after
        o[q.inside] = q.own(_divided(h, found.num, found.raw)).to(o.dtype)


def pull_causal(h: Head, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients of one head under causality to dq (L, d), dk (S, d) and dv (S, e)."""
    assert h.do is not None
    later = None
    for segment, opening in reversed(_openings(h)[0]):
        q, x = h.queries(segment)
        k, v = h.taken(h.k, segment), h.taken(h.v, segment)
        y, c = k.values, v.values
        found = _segment(x, y, c, opening)
        dn, dd = _divided_back(h, found.num, found.raw, h.taken(h.do, segment).values)
        S, z = found.before
        R, r = later or _nothing(y, c)
        R, R_after = _running(torch.bmm(x.mT, dn), R, back=True)
        r, r_after = _running(torch.bmm(x.mT, dd), r, back=True)
        later = R_after, r_after
        pairs = torch.bmm(dn, c.mT).add_(dd).tril_()
        dx = torch.bmm(dn, S.mT).baddbmm_(dd, z.mT).baddbmm_(pairs, y)
        dy = torch.bmm(c, R.mT).add_(r.mT).baddbmm_(pairs.mT, x)
        dc = torch.bmm(y, R).baddbmm_(found.pairs.mT, dn)
        dq[q.inside] += q.pulled(dx if h.rule.scale == 1 else dx.mul_(h.rule.scale))
        dk[k.inside] += k.pulled(dy)
        dv[v.inside] += v.pulled(dc)


# ---------------------------------------------------------------------------------------------- whole calls


class Whole(NamedTuple):
    """A call: all leading axes of the output, and how they pick a head."""

    leading: tuple[int, ...]
    groups: int  # query heads that share a head of k and v

    def places(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(size) for size in self.leading))

    def picked(self, x: Tensor, place: tuple[int, ...], trailing: int, shared: bool = False) -> Tensor:
        """The part of x, whose leading axes broadcast, that belongs to a head."""
        if shared and self.groups > 1:
            place = (*place[:-1], place[-1] // self.groups)
        own = x.ndim - trailing
        at = place[len(place) - own :] if own else ()
        return x[tuple(0 if size == 1 else n for size, n in zip(x.shape, at, strict=False))]


def _heads(op: str, given: Given, do: Tensor | None) -> Iterator[tuple[Whole, tuple[int, ...], Head]]:
    """Every head of a call."""
    q, k, v = (given[name] for name in DIFFERENTIABLE)
    xp = namespace(q)
    rule = _rule(op, given)
    common = {name: given[name] for name in ("mask", "causal", "key_lengths", "query_mask") if name in given}
    gqa = given.get("enable_gqa", False)
    parts = parts_of(xp, q, k, False, **common)
    shift = parts.shift or 0
    whole = Whole(quadratic.leading_axes(q, k, v, gqa), q.shape[-3] // k.shape[-3] if gqa else 1)
    dtype, size = quadratic.compute_dtype(xp, q), given.get("chunk_size", 64)
    for place in whole.places():
        live, seen = (None if x is None else whole.picked(x, place, 1) for x in (parts.live, parts.seen))
        live, seen = (_wide(x, n) for x, n in ((live, q.shape[-2]), (seen, k.shape[-2])))
        yield (
            whole,
            place,
            Head(
                xp,
                rule,
                dtype,
                Sequence(whole.picked(q, place, 2), live, shift, rule.of_queries),
                Sequence(whole.picked(k, place, 2, shared=True), seen, 0, rule.of_keys),
                Sequence(whole.picked(v, place, 2, shared=True), seen, 0),
                None if do is None else Sequence(whole.picked(do, place, 2), live, shift),
                min(size, max(1, k.shape[-2], q.shape[-2])),
                parts.shift is not None,
            ),
        )


def _wide(x: Tensor | None, n: int) -> Tensor | None:
    return x if x is None else x.expand(n)


def _forward(op: str, given: Given) -> Tensor:
    q, k, v = (given[name] for name in DIFFERENTIABLE)
    leading = quadratic.leading_axes(q, k, v, given.get("enable_gqa", False))
    o = q.new_empty((*leading, q.shape[-2], v.shape[-1]))
    for whole, place, head in _heads(op, given, None) if o.numel() else ():
        (attend_causal if head.causal else attend_whole)(head, whole.picked(o, place, 2))
    return o


def _backward(op: str, given: Given, do: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    like = {name: given[name] for name in DIFFERENTIABLE}
    dtype = quadratic.compute_dtype(namespace(do), do)
    grads = {name: torch.zeros(x.shape, dtype=dtype) for name, x in like.items()}
    for whole, place, head in _heads(op, given, do) if do.numel() else ():
        pulled = (whole.picked(grads[name], place, 2, shared=name != "q") for name in DIFFERENTIABLE)
        (pull_causal if head.causal else pull_whole)(head, *pulled)
    return {name: grads[name].to(like[name].dtype) for name in wanted}


CUSTOM = register("chunked", _forward, _backward, DIFFERENTIABLE)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """An op of `RULES`."""
    return CUSTOM.attend(op, q=q, k=k, v=v, **options)


def pull(op: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """Its explicit gradients."""
    return CUSTOM.pull(op, do, q=q, k=k, v=v, **options)


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Any) -> str | None:
    """Why a call is not served in chunks."""
    if q.device.type != "cpu":
        return "chunks are for the CPU"
    if any(options.get(name) for name in ("initial_state", "return_state", "dstate")):
        return "states are served by the generic implementation"
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    mask = options.get("mask")
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        return "a mask of pairs is served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return None


def is_faster(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Any) -> bool:
    """Whether sequences are long enough."""
    return max(q.shape[-2], k.shape[-2]) >= TOKENS and math.prod(q.shape[:-2]) > 0


KERNELS = {op: Kernel("chunked", partial(attend, op), unsupported, is_faster) for op in RULES}
KERNELS |= {f"{op}_vjp": Kernel("chunked", partial(pull, op), unsupported, is_faster) for op in RULES}
