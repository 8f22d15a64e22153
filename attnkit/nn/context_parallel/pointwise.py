"""Point-wise attention over processes: queries are gathered, partial outputs are reduced once.

    o_i = Σ_r o_i^(r),   o_i^(r) = Σ_{j on process r} gain·n_i^-alpha·h(s_ij + shift) v_j

A weight depends on its own score and on n_i, which every process counts itself, so no row maximum or row sum is
sent (Wortsman et al. 2023 §1). One all-gather of q and one reduce-scatter of o; backward one all-gather of do and one
reduce-scatter of dq, while dk and dv need no communication.

With W processes, n tokens, Hq query heads and a batch of B each, b bytes in the dtype of q and c in the compute dtype,
a process sends (W - 1)·B·Hq·n·(d·b + e·c) bytes forward and (W - 1)·B·Hq·n·(e·b + d·c) backward; n is that of the
longest part where they differ. A key mask adds (W - 1)·bytes of it, forward, for n_i.
"""

import inspect

from torch import Tensor
from torch.nn.functional import pad

from attnkit._core.typing import AnyFunction, Keywords
from attnkit.nn.context_parallel.collectives import tied
from attnkit.nn.context_parallel.shards import (
    Shards,
    Visibility,
    all_keys,
    between,
    gather_tokens,
    own_keys,
    reach,
    reduce_scatter_tokens,
    visible_counts,
)


def attend(
    op: AnyFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    visibility: Visibility,
    options: Keywords,
) -> Tensor:
    """The local part of o."""
    own, total = shards.own, shards.total
    valid, length = _keys_and_length(op, q, shards, visibility, options)
    rows = reach(own, total, visibility)
    if isinstance(length, Tensor):
        length = length[..., rows.start : rows.stop]
    if length is not None:
        options = {**options, "length": length}
    queries = gather_tokens(q, shards)[..., rows.start : rows.stop, :]
    partial = op(queries, k, v, **between(rows, own, valid, visibility, q.device), **options)
    if not own:
        partial = tied(partial, queries, k, v)
    return reduce_scatter_tokens(pad(partial, (0, 0, rows.start, total - rows.stop)), shards)


def _keys_and_length(
    op: AnyFunction, q: Tensor, shards: Shards, visibility: Visibility, options: Keywords
) -> tuple[Tensor | None, Tensor | float | str | None]:
    """The local keys that may be attended to, and n of all queries as the op's `length`; None for an op without one."""
    length = options.get("length", "visible")
    if length == "visible" and "length" in inspect.signature(op).parameters:
        valid = all_keys(visibility, shards, q.device)
        own = None if valid is None else valid[..., shards.own.start : shards.own.stop]
        return own, visible_counts(valid, shards, visibility, q)
    valid = own_keys(visibility, shards, q.device)
    return valid, max(shards.total, 1) if length == "all" else options.get("length")
