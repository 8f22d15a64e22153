"""What the kit does not ask of the kernels of rows. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

import itertools
from typing import Any

import pytest
import torch

import attnkit
import attnkit_reference
from attnkit.backends.torch.triton import rows as triton_rows
from attnkit.kernels.triton import rows as kernels
from attnkit.kernels.triton import sizes
from benchmarks.sass.goals import STEPS

from .in_interpreter import EPS, agree, draw, inputs

OP = "entmax_attention"


def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call served by small tiles."""
    monkeypatch.setattr(sizes, "resident", lambda *of: None)
    monkeypatch.setattr(sizes, "rows", lambda *of: sizes.Tile(16, 16, 4, 1))


def expected(op: str, *arrays: torch.Tensor, **options: Any) -> torch.Tensor:
    options |= {"bias": options["bias"].double()} if "bias" in options else {}
    found: torch.Tensor = getattr(attnkit, op)(*(x.double() for x in arrays), **options, impl="generic")
    return found


def adversarial(keys: int) -> torch.Tensor:
    """Scores whose thresholds are awkward: ties, one large score, equal ones, offsets, and slow descents."""
    n = torch.arange(keys, dtype=torch.float32)
    falling = torch.cumsum(torch.cumprod(torch.full((keys,), 1.2), 0) * 1e-6, 0).clamp(max=20.0)
    rows = [
        torch.where(n % 3 == 0, 0.0, -0.25),
        torch.where(n == keys // 2, 0.0, -50.0),
        torch.where(n == keys - 1, 0.0, -0.9921875),
        n * 0 + 7.0,
        n * 0 - 2.0**13,
        torch.where(n < keys // 2, 2.0**13, 2.0**13 - 0.25) - torch.where(n == 0, 0.5, 0.0),
        -torch.log1p(n),
        -falling,
        *(draw(seed, keys) * size for seed, size in enumerate((0.01, 0.1, 1.0, 10.0))),
    ]
    return torch.stack(rows)


MASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "bias": draw(6, 40, 70)},
    "window": {"window": (40, 8)},
}


@pytest.mark.parametrize("options", MASKED.values(), ids=MASKED)
def test_masks_in_blocks_whose_hidden_tokens_are_nan(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks between the edges are not asked which keys they see unless something is NaN."""
    tiled(monkeypatch)
    q, k, v, _ = (x[:1, :1] for x in inputs(40, 70))
    shown, asked = torch.arange(70) % 5 != 2, torch.arange(40) % 7 != 3
    for query_mask in (None, asked):
        given = options | {"mask": (draw(7, 40, 70) > -1) & shown, "query_mask": query_mask}
        o, lse = attnkit.softmax_attention(q, k, v, return_lse=True, impl="generic", **given)
        for keys, values in ((k, v), (x.masked_fill(~shown[:, None], torch.nan) for x in (k, v))):
            found = triton_rows.attend("softmax_attention", q, keys, values, return_lse=True, **given)
            agree(found[0], o)
            agree(found[1].nan_to_num(neginf=-1e4), lse.nan_to_num(neginf=-1e4))


@pytest.mark.parametrize("where", ["resident", "tiled"])
@pytest.mark.parametrize("keys", [1, 2, 100])
@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.25])
def test_rows_sum_to_one_on_the_support_of_the_reference(
    alpha: float, keys: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With v = 1 on the diagonal the output is the weights; scores are the bias alone."""
    if where == "tiled":
        tiled(monkeypatch)
    s, one = adversarial(keys), torch.eye(keys)
    q, k = torch.zeros(len(s), 1), torch.zeros(keys, 1)
    p = triton_rows.attend(OP, q, k, one, bias=s, alpha=alpha)
    exact = expected(OP, q, k, one, bias=s, alpha=alpha)
    assert torch.all((p.double().sum(-1) - 1).abs() <= 4 * EPS)
    assert torch.equal(p > 0, exact > 0) or alpha == 1.25  # where the power underflows is not asked
    assert torch.all((p - exact).abs() <= 16 * EPS / (alpha - 1)), (p - exact).abs().max()


@pytest.mark.parametrize(
    ("where", "dtype"), [("resident", torch.float32), ("resident", torch.float16), ("tiled", torch.float16)], ids=str
)
def test_a_row_does_not_see_how_many_steps_its_neighbours_need(
    where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = 100
    if where == "tiled":
        tiled(monkeypatch)
        keys = 90  # calls of the same shapes keep their launches
    s, one = adversarial(keys), torch.eye(keys, dtype=dtype)
    q, k = torch.zeros(len(s), 1, dtype=dtype), torch.zeros(keys, 1, dtype=dtype)
    together = triton_rows.attend(OP, q, k, one, bias=s, alpha=1.25)
    for i in range(1, len(s), 3):
        assert torch.equal(triton_rows.attend(OP, q[:1], k, one, bias=s[i : i + 1], alpha=1.25)[0], together[i])


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3])
def test_a_threshold_of_many_keys_takes_the_steps_that_goals_count(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of normal scores in a half type: each step sums weights and slopes of every tile, the last pass weights alone."""
    monkeypatch.setattr(sizes, "rows", lambda *of: sizes.Tile(16, 64, 4, 1))
    tiles, summed, sums_of = 16, [], kernels.sums_of
    monkeypatch.setattr(kernels, "sums_of", lambda x: summed.append(x) or sums_of(x))
    q, k, v = (draw(seed, n, 16).half() for seed, n in enumerate((16, 64 * tiles, 64 * tiles)))
    o = triton_rows.attend(OP, q, k, v, alpha=alpha)
    exact = expected(OP, q, k, v, alpha=alpha)
    assert (o - exact).abs().max() <= 2e-3 * exact.abs().max()
    assert len(summed) <= tiles * (2 * STEPS + 1)


WINDOWS = (None, (20, 3))
CALLS: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("softmax_attention", {}, 33, 70),
    (OP, {"alpha": 2.0}, 40, 19),
)


@pytest.mark.parametrize(("op", "own", "queries", "keys"), CALLS, ids=["softmax", "sparsemax"])
def test_blocks_that_are_seen_whole_in_part_or_not_at_all(
    op: str, own: dict[str, Any], queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled(monkeypatch)
    q, k, v, do = (x[:1, :1] for x in inputs(queries, keys))
    lengths = torch.tensor([[keys * 2 // 3]])
    for n, (window, causal) in enumerate(itertools.product(WINDOWS, (False, True, "upper_left"))):
        options = {"causal": causal, "window": window, **own} | ({"key_lengths": lengths} if n % 2 else {})
        agree(triton_rows.attend(op, q, k, v, **options), expected(op, q, k, v, **options).float())
        exact = expected(f"{op}_vjp", q, k, v, do, **options)
        for name, grad in triton_rows.pull(op, q, k, v, do, **options).items():
            agree(grad, exact[name].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("op", "own"), [("softmax_attention", {}), (OP, {"alpha": 1.5})], ids=["softmax", "entmax"])
@pytest.mark.parametrize("scale", [-40.0, -0.3, 0.0, 40.0])
def test_any_scale(
    scale: float, op: str, own: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half types take the maximum of products, which a negative scale would turn into the minimum of scores."""
    tiled(monkeypatch)
    q, k, v, do = (x[:1, :1].to(dtype) for x in inputs(20, 40))
    options = {"scale": scale, "causal": True, **own}
    allowed = 4e-5 if dtype == torch.float32 else 2e-3
    exact = expected(op, q, k, v, **options)
    assert (triton_rows.attend(op, q, k, v, **options) - exact).abs().max() <= allowed * exact.abs().max()
    exact = expected(f"{op}_vjp", q, k, v, do.double(), **options)
    for name, grad in triton_rows.pull(op, q, k, v, do, **options).items():
        assert (grad - exact[name]).abs().max() <= allowed * max(exact[name].abs().max(), 1e-6), name
    if op == "softmax_attention":
        _, lse = triton_rows.attend(op, q, k, v, return_lse=True, **options)
        _, exact = expected(op, q, k, v, return_lse=True, **options)
        assert ((lse - exact).abs() <= 1e-5 * exact.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("own", [{"alpha": 1.5}, {"alpha": 2.0}, {"alpha": 1.25}], ids=["1.5", "sparsemax", "1.25"])
def test_a_bias_of_half_types_in_rows_of_many_keys(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bias half types take the maximum of products; with one these are no scores."""
    tiled(monkeypatch)
    q, k, v, do = (x[:1, :1].half() for x in inputs(20, 40))
    options = {"bias": draw(9, 1, 1, 20, 40).half(), **own}
    exact = expected(OP, q, k, v, **options)
    assert (triton_rows.attend(OP, q, k, v, **options) - exact).abs().max() <= 2e-3 * exact.abs().max()
    exact = expected(f"{OP}_vjp", q, k, v, do.double(), **options)
    for name, grad in triton_rows.pull(OP, q, k, v, do, **options).items():
        assert (grad - exact[name]).abs().max() <= 2e-3 * exact[name].abs().max(), name


def test_gradients_of_broadcast_arguments_are_summed_and_only_those_wanted_are_made() -> None:
    q, k, v, do = inputs(9, 11)
    q, k, bias = q[:, :1], k[:1], draw(9, 2, 1, 1, 11)
    exact = attnkit.entmax_attention_vjp(q, k, v, do, impl="generic", bias=bias)
    for name, grad in triton_rows.pull(OP, q, k, v, do, bias=bias).items():
        agree(grad, exact[name])
    (dv,) = torch.autograd.grad(triton_rows.attend(OP, q, k, v.requires_grad_(), bias=bias), v, do)
    agree(dv, exact["v"])


def test_cotangents_of_lse_alone_and_of_both() -> None:
    q, k, v, do = inputs(9, 11)
    dlse = draw(5, 2, 2, 9)
    q, k = q.requires_grad_(), k.requires_grad_()
    o, lse = triton_rows.attend("softmax_attention", q, k, v, return_lse=True, causal=True)
    zero = attnkit.softmax_attention_vjp(q, k, v, None, dlse, causal=True, impl="generic")
    agree(torch.autograd.grad(lse, q, dlse, retain_graph=True)[0], zero["q"])
    both = attnkit.softmax_attention_vjp(q, k, v, do, dlse, causal=True, impl="generic")
    agree(torch.autograd.grad((o, lse), k, (do, dlse))[0], both["k"])
    explicit = triton_rows.pull("softmax_attention", q, k, v, do, dlse, causal=True)
    for name, grad in explicit.items():
        agree(grad, both[name])


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [(60, 60, {}), (37, 90, {}), (70, 41, {}), (50, 75, {"window": (20, None)}), (50, 75, {"key_lengths": 60})],
    ids=str,
)
def test_gradients_of_gates_have_the_digits_of_their_own_pairs(
    queries: int, keys: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several groups; behind strong gates little is left, which is not to be lost beside what is before them."""
    tiled(monkeypatch)
    op, (q, k, v, do) = "forgetting_attention", (x[:1, :1] for x in inputs(queries, keys))
    gates = torch.where(torch.arange(keys) % 23 == 19, -20.0, -draw(8, keys).abs() / 50)
    arrays = [x[0, 0].double().numpy() for x in (q, k, v)]
    given = (gates.double().numpy(), do[0, 0].double().numpy())
    functions = (getattr(attnkit_reference, f"{op}_{of}") for of in ("vjp", "magnitudes"))
    exact, own = (function(*arrays, *given, **options)["log_forget"] for function in functions)
    found = triton_rows.pull(op, q, k, v, do, log_forget=gates, **options)["log_forget"].double().numpy()
    assert (abs(found - exact) <= 64 * EPS * own).all()
    assert own[own > 0].min() < 1e-3 < 1.0 < own.max()


def test_no_keys_or_no_queries() -> None:
    q, k, v, _ = inputs(3, 4)
    o, lse = triton_rows.attend("softmax_attention", q, k[..., :0, :], v[..., :0, :], return_lse=True)
    assert torch.all(o == 0)
    assert torch.all(lse == -torch.inf)
    none = q[..., :0, :]
    assert triton_rows.attend(OP, none, k, v).shape == (2, 2, 0, 5)
    grads = triton_rows.pull(OP, none, k, v, torch.zeros(2, 2, 0, 5))
    assert all(torch.all(grad == 0) for grad in grads.values())
