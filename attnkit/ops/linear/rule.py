"""Whole calls, steps and gradients of linear, cosine and Performer attention, each a `Rule`."""

from typing import Any

from attnkit._core import quadratic
from attnkit._core.tokens import chosen, join_heads, split_heads
from attnkit._core.typing import Array, Namespace
from attnkit.ops.linear.resume import final_state, initial_gradients, kept_of, state_backward, state_sums
from attnkit.ops.linear.states import Options, State, cast_like, gathered
from attnkit.ops.linear.sums import Call, Rule, divided, divided_backward, prepared, sums, sums_backward


def attend(xp: Namespace, rule: Rule, q: Array, k: Array, v: Array, options: Options, return_state: bool) -> Any:
    """o in the dtype of q, or (o, state)."""
    m = prepared(xp, rule, q, k, v, options.initial_state, return_state, options.chunk_size, options.common)
    o = divided(xp, m, sums(xp, m))
    o = quadratic.cast(xp, join_heads(xp, o, m.parts.shared), q.dtype)
    if not return_state:
        return o
    kept = kept_of(xp, m, cast_like(xp, q, v)[0])
    return o, final_state(xp, m, kept, state_sums(xp, m, kept))


def step(
    xp: Namespace, rule: Rule, q_t: Array, k_t: Array, v_t: Array, state: State | None, enable_gqa: bool
) -> tuple[Array, State]:
    """(o_t, state): the new key is added first, and the query sees what there is then."""
    q, k, v = (a[..., None, :] for a in (q_t, k_t, v_t))
    m = prepared(xp, rule, q, k, v, state, True, 1, {"enable_gqa": enable_gqa})
    kept = kept_of(xp, m, cast_like(xp, q, v)[0])
    held = state_sums(xp, m, kept)
    o = divided(xp, m, m.x @ held)
    o = quadratic.cast(xp, join_heads(xp, o, m.parts.shared), q.dtype)
    return o[..., 0, :], final_state(xp, m, kept, held)


def _outputs_backward(xp: Namespace, m: Call, do: Array) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of φ(q), φ(k) (their values), of [v, 1] and of the initial [S, z] for do."""
    parts = m.parts
    do = chosen(xp, parts.live, split_heads(xp, do, parts.shared))
    dx, dy, dc, dstate = sums_backward(xp, m, divided_backward(xp, m, sums(xp, m), do))
    dx = dx if m.rule.scale == 1 else dx * m.rule.scale
    dy = dy if m.fade is None else dy * m.fade
    return chosen(xp, parts.live, dx), chosen(xp, parts.seen, dy), chosen(xp, parts.seen, dc), dstate


def attend_vjp(
    xp: Namespace, rule: Rule, q: Array, k: Array, v: Array, do: Array | None, dstate: State | None, options: Options
) -> dict[str, Any]:
    """{"q", "k", "v"} and "initial_state" if given, each like its argument."""
    initial = options.initial_state
    m = prepared(xp, rule, q, k, v, initial, dstate is not None, options.chunk_size, options.common)
    wide_do, wide_v = cast_like(xp, q, do, v)
    shared, nothing = m.parts.shared, (None, None, None, None)
    dx, dy, dc, held = nothing if do is None else _outputs_backward(xp, m, wide_do)
    more_y, more_c, more_held, dlevel = nothing
    if dstate is not None:
        more_y, more_c, more_held, dlevel = state_backward(xp, m, kept_of(xp, m, wide_v), dstate)
        more_c = chosen(xp, m.parts.valid, more_c)
    dq = m.q.pull(gathered(xp, [dx], m.q.values, shared))
    dk = m.k.pull(gathered(xp, [dy, more_y], m.k.values, shared))
    dv = gathered(xp, [None if g is None else g[..., :-1] for g in (dc, more_c)], wide_v, shared)
    grads: dict[str, Any] = {
        "q": quadratic.cast(xp, quadratic.sum_to(xp, dq, tuple(q.shape)), q.dtype),
        "k": quadratic.cast(xp, quadratic.sum_to(xp, dk, tuple(k.shape)), k.dtype),
        "v": quadratic.cast(xp, dv, v.dtype),
    }
    if initial is not None:
        grads["initial_state"] = initial_gradients(xp, m, initial, [held, more_held], [dlevel])
    return grads


def step_vjp(
    xp: Namespace,
    rule: Rule,
    q_t: Array,
    k_t: Array,
    v_t: Array,
    do_t: Array | None,
    state: State | None,
    dstate: State | None,
    enable_gqa: bool,
) -> dict[str, Any]:
    """{"q_t", "k_t", "v_t"} and "state" if there was one."""
    q, k, v, do = (None if a is None else a[..., None, :] for a in (q_t, k_t, v_t, do_t))
    options = Options(state, 1, {"enable_gqa": enable_gqa})
    found = attend_vjp(xp, rule, q, k, v, do, dstate, options)
    grads = {f"{name}_t": found[name][..., 0, :] for name in "qkv"}
    return grads | ({"state": found["initial_state"]} if state is not None else {})
