"""Rules by which people judge a kernel: which of them notices which bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from attnkit_conformance import judge
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.isolated import Isolated
from attnkit_conformance.core import CaseResult
from attnkit_conformance.families import softmax
from attnkit_conformance.judge import selection
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Option, Params
from attnkit_conformance.studies.planted import BY_NAME, HONEST, planted

if TYPE_CHECKING:
    from torch import Tensor

OP = softmax.OPS[0].name
TOLERANCES = {"float32": 1e-4, "float16": 1e-2}
BASELINES = ("torch.nn.functional:scaled_dot_product_attention",)  # which a kernel in its place may not call
DRAWS = 5
BATCH, HEADS, TOKENS, FEATURES = 2, 4, 256, 64

Tensors = dict[str, "Tensor"]
Drawn = tuple[Tensors, Params, Tensors]  # arrays, params and cotangents


def by_kit(names: Sequence[str], profile: str) -> dict[str, list[CaseResult]]:
    """The verdicts of this kit that fail, for each bug: in this process, which is faster, and where none does, as `run`
    judges by default."""
    failed: dict[str, list[CaseResult]] = {name: [] for name in names}
    for result in judge.judge([planted(name) for name in names], profile, ops=(OP,)):
        failed[result.adapter] += [result] if result.status == "fail" else []
    return {name: verdicts or apart(name, profile) for name, verdicts in failed.items()}


def apart(name: str, profile: str) -> list[CaseResult]:
    """The verdicts that fail in a process of its own, where calls are repeated and torch's own function may not be
    called."""
    (adapter,) = selection.find([f"{planted.__module__}:{name}"], selection.Terms(calls=BASELINES))
    assert isinstance(adapter, Isolated)
    try:
        return [result for result in judge.judge([adapter], profile, ops=(OP,)) if result.status == "fail"]
    finally:
        adapter.close()


# ------------------------------------------------------------------------------------------------- normal draws


def by_draws(name: str, with_options: bool) -> bool:
    """Whether one of five normal draws tells, by torch.allclose at 1e-4 in float32 and 1e-2 in float16: a plain call,
    or one with the options that the bug is about. Expected is what the honest adapter answers."""
    about = BY_NAME[name].about if with_options and name != HONEST else ()
    adapter = planted(name)
    return any(
        tells(adapter, drawn(about, dtype, n), partial(close, right=expected(about, dtype, n), dtype=dtype))
        for dtype in TOLERANCES
        for n in range(DRAWS)
    )


def drawn(about: tuple[str, ...], dtype: str, seed: int) -> Drawn:
    """A call of this number with some options: half of the queries for "cross", two heads of keys for "grouped"."""
    import torch

    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(getattr(torch, dtype))

    L, S = TOKENS // 2 if "cross" in about else TOKENS, TOKENS
    shared = HEADS // 2 if "grouped" in about else HEADS
    arrays = {"q": normal(BATCH, HEADS, L, FEATURES)}
    arrays |= {name: normal(BATCH, shared, S, FEATURES) for name in ("k", "v")}
    if "turned" in about:  # (B, L, H, d) in memory, as projections leave it
        arrays = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in arrays.items()}
    options: Mapping[str, Callable[[], Tensor]] = {
        "mask": lambda: torch.rand(BATCH, HEADS, L, S, generator=rng) < 0.75,
        "bias": lambda: normal(HEADS, L, S),
        "key_lengths": lambda: torch.randint(1, S + 1, (BATCH, 1), generator=rng),
        "query_mask": lambda: torch.rand(BATCH, 1, L, generator=rng) < 0.75,
        "scale": lambda: torch.rand(HEADS, generator=rng) / 4,
        "dropout_mask": lambda: (torch.rand(BATCH, HEADS, L, S, generator=rng) < 0.9) / 0.9,
    }
    arrays |= {name: make() for name, make in options.items() if name in about}
    numbers: Params = {
        "causal": True, "window": (64, 64), "enable_gqa": True, "dropout": (0.1, 42 + seed), "return_lse": True,
    }  # fmt: skip
    words = {"grouped": "enable_gqa", "seed": "dropout", "lse": "return_lse"}
    params = {
        words.get(word, word): numbers[words.get(word, word)] for word in about if words.get(word, word) in numbers
    }
    cotangents = {"o": normal(BATCH, HEADS, L, FEATURES)}
    cotangents |= {"lse": torch.randn(BATCH, HEADS, L, generator=rng)} if "lse" in about else {}
    return arrays, params, cotangents


@cache
def expected(about: tuple[str, ...], dtype: str, seed: int) -> Tensors:
    """What the honest adapter answers."""
    return answers(planted(HONEST), drawn(about, dtype, seed))


def answers(adapter: Adapter, call: Drawn) -> Tensors:
    """Outputs, and gradients as d<name>, from arrays that the adapter may write to."""
    arrays, params, cotangents = call
    arrays = {name: x.clone() for name, x in arrays.items()}
    outputs = dict(adapter.call(OP, arrays, params))
    return outputs | {f"d{name}": x for name, x in adapter.vjp(OP, arrays, params, cotangents).items()}


def tells(adapter: Adapter, call: Drawn, agrees: Callable[[Tensors], bool]) -> bool:
    """Whether what an adapter answers does not agree, or is an error."""
    try:
        return not agrees(answers(adapter, call))
    except Exception:  # a bug may raise anything, and torch does where dtypes differ
        return True


def close(got: Tensors, right: Tensors, dtype: str) -> bool:
    """torch.allclose, for every result."""
    import torch

    allowed = TOLERANCES[dtype]
    return all(torch.allclose(got[name], x, rtol=allowed, atol=allowed) for name, x in right.items())


# ------------------------------------------------------------------------------------------------ torch's samples


def by_opinfo(name: str) -> bool:
    """Whether a sample of torch's own tests of scaled_dot_product_attention tells, by torch.testing.assert_close at its
    default tolerances, in four dtypes. Results at which the honest adapter fails too tell nothing."""
    adapter = planted(name)
    return any(tells(adapter, call, partial(alike, right=right)) for call, right in of_torch())


def alike(got: Tensors, right: Tensors) -> bool:
    return not unlike(got, right)


def unlike(got: Tensors, right: Tensors) -> list[str]:
    """The names of results that torch.testing.assert_close refuses."""
    import torch

    found = []
    for name, x in right.items():
        try:
            torch.testing.assert_close(got[name], x)
        except AssertionError:
            found.append(name)
    return found


@cache
def of_torch() -> list[tuple[Drawn, Tensors]]:
    """torch's samples as calls of an adapter, each with those of torch's results that the honest adapter meets."""
    honest, samples = planted(HONEST), []
    for dtype in DTYPES:
        for call, right in samples_of_torch(dtype):
            beyond = unlike(answers(honest, call), right)
            samples.append((call, {name: x for name, x in right.items() if name not in beyond}))
    return samples


def samples_of_torch(dtype: str) -> Iterator[tuple[Drawn, Tensors]]:
    """Those in a dtype, without samples of dropout, whose bits are torch's. torch's is_causal is "upper_left"."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(0)
    (row,) = (row for row in op_db if row.name == "nn.functional.scaled_dot_product_attention")
    for sample in row.sample_inputs("cpu", getattr(torch, dtype), requires_grad=True):
        options = dict(sample.kwargs)
        if options.get("dropout_p"):
            continue
        leaves = dict(zip("qkv", (sample.input, *sample.args), strict=True))
        o = torch.nn.functional.scaled_dot_product_attention(*leaves.values(), **options)
        do = torch.randn_like(o)
        grads = torch.autograd.grad(o, list(leaves.values()), do)
        arrays = {key: x.detach() for key, x in leaves.items()}
        mask = options.get("attn_mask")
        if mask is not None:
            arrays["mask" if mask.dtype == torch.bool else "bias"] = mask.detach()
        params: dict[str, Option] = {"causal": "upper_left"} if options.get("is_causal") else {}
        params |= {"enable_gqa": True} if options.get("enable_gqa") else {}
        right = {"o": o.detach()} | {f"d{key}": x for key, x in zip(leaves, grads, strict=True)}
        yield (arrays, params, {"o": do}), right
