"""The delta rule: a state corrects what it holds about a key (DeltaNet, gated DeltaNet, Kimi delta attention).

Within a chunk the corrections u_i = β_i (v_i - (what the state before the chunk holds about k_i) - Σ_{j<i} (k_i·k_j, as
far as it has not faded) u_j) are a unit lower triangular system. Its inverse is made once; then chunk follows chunk.
"""

from collections.abc import Mapping
from typing import NamedTuple, Unpack

from attnkit._core.quadratic import sum_to
from attnkit._core.special import folded
from attnkit._core.typing import AnyFunction, Array, Factor, Impl, Keywords, Namespace, Results
from attnkit.ops.linear.chunks import Fades, fade, fades, inverse, products, pull_products, sums_before, sums_from
from attnkit.ops.linear.states import State
from attnkit.ops.recurrent.record import Call, Recurrent, Tokens, op, step_of, step_vjp_of, vjp_of, weights_of


def _numbers(gates: Mapping[str, Array]) -> tuple[str, ...]:
    """log_decay is a number per token if it has as many axes as beta."""
    decay = gates.get("log_decay")
    return ("beta",) if decay is None or decay.ndim > gates["beta"].ndim else ("beta", "log_decay")


class _Chunks(NamedTuple):
    """What all chunks have before any state is known."""

    f: Fades
    keys: Array  # (..., chunks, size, size): k·k of pairs, read below the diagonal
    pairs: Array  # (..., chunks, size, size): q·k of pairs
    inverse: Array  # (..., chunks, size, size)
    k_within: Array  # (..., chunks, size, d)
    k_until: Array  # (..., chunks, size, d)
    q_within: Array  # (..., chunks, size, d)
    lead: tuple[int, ...]  # of states


def _chunks(xp: Namespace, m: Call) -> _Chunks:
    g = m.gate("log_decay")
    f = fades(xp, g)
    keys = m.k @ m.k.mT if g is None else products(xp, m.k, m.k, g)
    inverted = inverse(xp, m.gates["beta"] * keys)
    pairs = products(xp, m.q, m.k, g)
    lead = (*m.first.shape[:-2], m.k.shape[-3])
    return _Chunks(f, keys, pairs, inverted, fade(m.k, f.within), fade(m.k, f.until), fade(m.q, f.within), lead)


def _folded(
    xp: Namespace, c: _Chunks, step: AnyFunction, first: Array, *parts: Array, backwards: bool = False
) -> tuple[Array, tuple[Array, ...]]:
    """step(S, whole, *parts) for one chunk after another; whole is what all its tokens leave of a state."""
    if isinstance(c.f.whole, float):
        return folded(xp, lambda S, *own: step(S, 1.0, *own), first, parts, backwards)
    return folded(xp, step, first, (c.f.whole.mT, *parts), backwards)


def _run(xp: Namespace, m: Call, c: _Chunks, outputs: AnyFunction, *parts: Array) -> tuple[Array, tuple[Array, ...]]:
    """The last state, and outputs(S, u, *parts) of each chunk from the state before it and its corrections."""
    scaled = c.inverse * m.gates["beta"].mT
    wanted, held = scaled @ m.v, scaled @ c.k_within

    def step(S: Array, whole: Factor, wanted: Array, held: Array, k: Array, *own: Array) -> Results:
        u = wanted - held @ S
        return fade(S, whole) + k @ u, outputs(S, u, *own)

    if not wanted.shape[-3]:
        none = m.first[..., None, :, :][..., :0, :, :]
        return m.first + xp.sum(c.k_until.mT @ wanted, axis=-3), outputs(none, wanted, *parts)
    return _folded(xp, c, step, m.first, wanted, held, c.k_until.mT, *parts)


def forward(xp: Namespace, m: Call) -> tuple[Array, Array]:
    """Pairs of queries and corrections of a chunk, and what the state before it gives."""
    c = _chunks(xp, m)
    last, (o,) = _run(xp, m, c, lambda S, u, pairs, q: (pairs @ u + q @ S,), c.pairs, c.q_within)
    return o, last


def backward(xp: Namespace, m: Call, do: Array, dstate: Array) -> Keywords:
    """The transposes of `forward`, from the last chunk to the first."""
    g, beta, c = m.gate("log_decay"), m.gates["beta"], _chunks(xp, m)
    _, (states, u) = _run(xp, m, c, lambda S, u: (S, u))
    size, (d, e) = m.k.shape[-2], m.first.shape[-2:]
    du = sum_to(xp, c.pairs.mT @ do, (*c.lead, size, e))
    drawn = sum_to(xp, c.q_within.mT @ do, (*c.lead, d, e))
    if not du.shape[-3]:
        return _nothing(xp, m, dstate)

    def step(R: Array, whole: Factor, du: Array, drawn: Array, k: Array, transposed: Array, held: Array) -> Results:
        db = transposed @ (du + k @ R)
        return fade(R, whole) + drawn - held @ db, (R, db)

    held = (beta * c.k_within).mT
    R, (after, db) = _folded(xp, c, step, dstate, du, drawn, c.k_until, c.inverse.mT, held, backwards=True)

    error = m.v - c.k_within @ states
    de, da = beta * db, -xp.tril(db @ u.mT, k=-1)
    of_keys = pull_products(xp, m.k, m.k, g, beta * da, c.keys)
    of_pairs = pull_products(xp, m.q, m.k, g, do @ u.mT, c.pairs)
    through_q = fade(do @ states.mT, c.f.within)
    through_k, until_k = -fade(de @ states.mT, c.f.within), fade(u @ after.mT, c.f.until)
    wide = (*c.lead, size, d)
    grads = {
        "q": of_pairs.x + through_q,
        "k": of_keys.x + of_keys.y + sum_to(xp, of_pairs.y, wide) + through_k + until_k,
        "v": de,
        "beta": xp.sum(db * error, axis=-1, keepdims=True) + xp.sum(da * c.keys, axis=-1, keepdims=True),
        "first": R,
    }
    if g is not None:
        from_start = sum_to(xp, m.q * through_q, wide) + m.k * through_k
        dg = sums_from(xp, from_start) + sums_before(xp, m.k * until_k)
        dg = dg + xp.sum(after * states, axis=-1)[..., None, :] * c.f.whole
        dg = dg if g.shape[-1] > 1 else xp.sum(dg, axis=-1, keepdims=True)
        shape = tuple(dg.shape)
        grads["log_decay"] = dg + of_keys.g + sum_to(xp, of_pairs.g, shape)
    return grads


def _nothing(xp: Namespace, m: Call, R: Array) -> Keywords:
    """The gradients of a call of no tokens."""
    zeros = {name: xp.zeros_like(x) for name, x in {"q": m.q, "k": m.k, "v": m.v, **m.gates}.items()}
    return {**zeros, "first": R}


def token(xp: Namespace, m: Call) -> tuple[Array, Array]:
    """One step of the recurrence."""
    g = m.gate("log_decay")
    S = m.first if g is None else m.first * xp.exp(g)[..., None]
    u = m.gates["beta"] * (m.v - (m.k[..., None, :] @ S)[..., 0, :])
    S = S + m.k[..., None] * u[..., None, :]
    return (m.q[..., None, :] @ S)[..., 0, :], S


DELTA = Recurrent("delta_attention", ("beta",), ("log_decay",), _numbers, forward, backward, token)


@op(DELTA)
def delta_attention(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    log_decay: Array | None = None,
    causal: bool = True,
    chunk_size: int = 32,
    initial_state: State | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> Array | tuple[Array, State]:
    """o_t = scale·S_tᵀ q_t with S_t = P + β_t k_t (v_t - Pᵀk_t)ᵀ, P = diag(exp(g_t)) S_{t-1}, S_0 = 0 or initial_state.

    Before k_t writes v_t, the state gives up the share β_t of what it holds about k_t. DeltaNet (Schlag et al. 2021 §4,
    Yang et al. 2024) has no decay, gated DeltaNet (Yang et al. 2025 eq 10) a number g_t, Kimi delta attention (2025)
    one per feature.

    Args:
        q: (..., T, d). Leading axes broadcast; heads are axis -3.
        k: (..., T, d), used as they are: with β‖k‖² <= 2 a state cannot grow by itself, so models divide keys by their
            norms.
        v: (..., T, e).
        beta: (..., T), any real float dtype, from 0 (nothing is written) over 1 (v_t replaces what was held) to 2.
        log_decay: g, any real float dtype, at most 0: (..., T), a number per token, or with one axis more than beta
            (..., T, d), a number per feature. None is 0, nothing fades.
        causal, chunk_size, initial_state, return_state, impl, **common: as in `gated_linear_attention`; beta and
            log_decay of hidden tokens are read as 0.

    Returns, raises: as `gated_linear_attention`.
    """


delta_attention_weights = weights_of(
    delta_attention,
    DELTA,
    """w_ij = scale·q_iᵀ Π_{t=i..j+1} (I - β_t k_t k_tᵀ) diag(exp(g_t)) β_j k_j for j <= i, 0 elsewhere and at hidden
    tokens.""",
)
delta_attention_vjp = vjp_of(
    delta_attention,
    DELTA,
    """Gradients {"q", "k", "v", "beta"} and, where they were given, "log_decay" and "initial_state" (a tuple), for the
    cotangents do and dstate = (dS,); None is 0.

    With R_t the gradient of S_t, r = v_t - Pᵀk_t and dr = β_t R_tᵀk_t: dq_t = scale·S_t do_t, dk_t = β_t R_t r - P dr,
    dv_t = dr, dβ_t = (R_tᵀk_t)·r, dP = R_t - k_t drᵀ, dg_t = Σ_e dP ⊙ P, R_{t-1} = scale·q_{t-1} do_{t-1}ᵀ +
    diag(exp(g_t)) dP; chunk by chunk as the op itself.
    """,
)
delta_attention_step = step_of(
    delta_attention,
    DELTA,
    """One more token: S' = P + β_t k_t (v_t - Pᵀk_t)ᵀ, P = diag(exp(g_t)) S, o_t = scale·S'ᵀ q_t.

    Args:
        state: from `delta_attention` or this function; None = nothing seen yet. It is not changed.
        q_t, k_t: (..., d). Leading axes broadcast; heads are axis -2.
        v_t: (..., e).
        beta_t: (...).
        log_decay_t: (...) or, with one axis more than beta_t, (..., d).
        scale, impl: as in `delta_attention`.

    Returns:
        (o_t (..., e) in the dtype of q_t, (S',) in the compute dtype).
    """,
)
delta_attention_step_vjp = step_vjp_of(
    delta_attention,
    DELTA,
    """Gradients {"q_t", "k_t", "v_t", "beta_t"}, and "log_decay_t" and "state" (a tuple) where they were given, for
    do_t and dstate (None = 0).""",
)
