"""Meta and fake tensors give shapes, dtypes and devices without data (semantics E4): every op, kernel and module.

What ops are called with are the cases of the conformance kit, so that a new op is among them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

import attnkit
from attnkit import analysis
from attnkit.nn import (
    GatedAttentionUnit,
    KeyValueMemory,
    LSHAttention,
    MultiHeadAttention,
    SoftAttention1d,
    SoftAttention2d,
    capture,
)
from attnkit.nn.attention import _served
from attnkit.nn.gates import is_causal_alone
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.base import implementations
from attnkit_conformance.adapters.bases.torch import pulled_back
from attnkit_conformance.adapters.torch import Autograd, Explicit
from attnkit_conformance.core import samples, typed_arrays, typed_cotangents
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes.attention import scene_case

EXPLICIT = {impl: ops or tuple(BY_NAME) for impl, ops in implementations("torch", gradients=True).items()}
EXPLICIT["auto"] = EXPLICIT["generic"]
SERVED = [(impl, op) for impl, ops in implementations("torch").items() for op in ops or ()]
BROADCAST = Scene("broadcast", 5, 7, d=4, e=6, lead=((3, 1), (1, 2), (2,)))
Arrays = Mapping[str, Tensor]
Likes = dict[str, tuple[torch.Size, torch.dtype, str]]


def likes(arrays: Arrays) -> Likes:
    return {name: (x.shape, x.dtype, x.device.type) for name, x in arrays.items()}


def moved(found: Likes, device: str) -> Likes:
    return {name: (shape, dtype, device) for name, (shape, dtype, _) in found.items()}


def results(case: Case, impl: str, arrays: Arrays, cotangents: Arrays) -> Iterator[Likes]:
    """What outputs, gradients by autograd and explicit gradients look like; Unsupported where `impl` refuses."""
    op = BY_NAME[case.op]
    leaves = {name: arrays[name].detach().requires_grad_() for name in op.differentiable if name in arrays}
    outputs = Autograd("", impl, "meta", "").call(case.op, {**arrays, **leaves}, case.params)
    yield likes(outputs)
    if op.vjp:
        yield likes(pulled_back(outputs, leaves, cotangents))
    if op.vjp and case.op in EXPLICIT.get(impl, ()):
        yield likes(Explicit("", impl, "meta", "").vjp(case.op, arrays, case.params, cotangents))


def assert_like_data(case: Case, impl: str, as_given: Callable[[Tensor], Tensor], device: str, kinds: int = 3) -> None:
    """Outputs look as those of the generic implementation with data, gradients as what they are of."""
    with_data = Explicit("data", "generic", "cpu", "")
    arrays, cotangents = typed_arrays(with_data, case), typed_cotangents(with_data, case)
    given = [{name: as_given(x) for name, x in held.items()} for held in (arrays, cotangents)]
    found = [*islice(results(case, impl, *given), kinds)]  # before what is compared, for one that refuses
    outputs = likes(with_data.call(case.op, arrays, case.params))
    grads = {name: x for name, x in likes(arrays).items() if name in BY_NAME[case.op].differentiable}
    assert found == [moved(wanted, device) for wanted in (outputs, grads, grads)][: len(found)], case.id


@pytest.mark.parametrize("part", [0, pytest.param(3, marks=pytest.mark.referee)])
@pytest.mark.parametrize(("place", "op"), [*enumerate(BY_NAME)])
def test_meta_tensors(place: int, op: str, part: int) -> None:
    """On a sixth of the cases, and of every six ops on all; `make conformance` has another sixth."""
    for sample in list(samples(op, "small", ("float32",)))[(place + part) % 6 :: 6]:
        assert_like_data(sample.draw(0), "auto", partial(torch.Tensor.to, device="meta"), "meta")


@pytest.mark.parametrize(("impl", "op"), [("generic", "softmax_attention"), *SERVED])
def test_a_kernel_serves_meta_tensors_or_refuses(impl: str, op: str) -> None:
    case = next(samples(op, "small", ("float16", "float32"))).draw(0)
    with suppress(Unsupported) if impl != "generic" else nullcontext():
        assert_like_data(case, impl, partial(torch.Tensor.to, device="meta"), "meta")


@pytest.mark.parametrize("op", [op.name for op in OPDB])
def test_fake_tensors(op: str) -> None:
    """Outputs: what is inside gradients has been met on meta."""
    *_, sample = samples(op, "small", ("float32",))
    with FakeTensorMode() as mode:
        assert_like_data(sample.draw(0), "auto", mode.from_tensor, "cpu", kinds=1)


@pytest.mark.parametrize(("impl", "op"), [(impl, op) for impl, op in SERVED if not impl.startswith("triton")])
def test_kernels_for_the_cpu_on_fake_tensors(impl: str, op: str) -> None:
    """With leading axes that broadcast, and a case of the kit, heads in groups where the kernel serves them."""
    row, served = BY_NAME[op], 0
    given = (sample.draw(0) for sample in reversed(list(samples(op, "small", ("float32", "float16")))))
    broadcast = [scene_case(row, BROADCAST, {}, "meta", "float16")] if row.group in ("a", "b", "c") else []
    for case in chain(broadcast, given):
        with FakeTensorMode() as mode, suppress(Unsupported):
            assert_like_data(case, impl, mode.from_tensor, "cpu")
            served += 1
        if served > len(broadcast):
            return
    assert served


# ---------------------------------------------------------------------------------------------- modules

OPTIONS: dict[str, dict[str, Any]] = {
    "linformer_attention": {"num_slots": 3, "max_length": 9},
    "nystrom_attention": {"num_landmarks": 3},
    "rela_attention": {"gated": True},
}
ATTENTION = [name for name in attnkit.__all__ if name.endswith("_attention") and _served(name)]
TOKENS, PICTURE = (6, 24), (4, 6, 24)
MODULES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    **{
        name: (
            partial(
                *(MultiHeadAttention, 24, 4),
                op=name,
                options=OPTIONS.get(name, {}),
                causal=is_causal_alone(getattr(attnkit, name)),
            ),
            TOKENS,
        )
        for name in ATTENTION
    },
    "causal": (partial(MultiHeadAttention, 24, 4, causal=True, num_kv_heads=2, qk_norm=True, gate=silu), TOKENS),
    "decay heads": (partial(MultiHeadAttention, 24, 4, op="linear", causal=True, decay="heads"), TOKENS),
    "decay tokens": (partial(MultiHeadAttention, 24, 4, op="linear", causal=True, decay="tokens"), TOKENS),
    "decay features": (partial(MultiHeadAttention, 24, 4, op="delta", causal=True, decay="features"), TOKENS),
    "dropout": (partial(MultiHeadAttention, 24, 4, dropout=0.2, value_conv=3), TOKENS),
    "gated": (partial(GatedAttentionUnit, 24, qk_dim=8, dropout=0.2, causal=True), TOKENS),
    "memory": (partial(KeyValueMemory, 24, 7, norm=True), TOKENS),
    "lsh": (partial(LSHAttention, 24, 4, num_buckets=4, chunk_size=4), TOKENS),
    "soft1d": (partial(SoftAttention1d, 24, 4, window=4), TOKENS),
    "soft2d": (partial(SoftAttention2d, 24, 4, landmark_norm=True, value_conv=3), PICTURE),
    "soft2d even": (partial(SoftAttention2d, 24, 4, num_landmarks=4), PICTURE),
    "soft2d convolution": (partial(SoftAttention2d, 24, 4, sampling="convolution"), PICTURE),
    "soft2d random": (partial(SoftAttention2d, 24, 4, sampling="random"), PICTURE),
    "soft2d biased": (partial(SoftAttention2d, 24, 4, sampling="biased", inverse_grad="unrolled"), PICTURE),
}
MASKS: dict[type[nn.Module], tuple[str, ...]] = {
    MultiHeadAttention: ("key_mask", "query_mask"),
    GatedAttentionUnit: ("key_mask", "query_mask"),
    KeyValueMemory: (),
}


def calls(layer: nn.Module, shape: tuple[int, ...], device: str) -> Iterator[dict[str, Any]]:
    """Options of calls of a module, tensors without data among them."""
    there = torch.ones(2, math.prod(shape[:-1]), dtype=torch.bool, device=device)
    masks = dict.fromkeys(MASKS.get(type(layer), ("token_mask",)), there)
    if not isinstance(layer, MultiHeadAttention):
        yield masks
        return
    yield {**masks, "return_weights": True}
    if layer.causal:
        yield {"cache": layer.new_cache(2, 9)}


def trained(name: str, device: str, mode: AbstractContextManager[Any]) -> list[Likes]:
    """What a module gives, and its gradients, in every call."""
    build, shape = MODULES[name]
    found = []
    with mode:
        layer = build(device=device)
        for options in calls(layer, shape, device):
            x = torch.ones(2, *shape, device=device, requires_grad=True)
            out = layer(x, **options)
            given = out if isinstance(out, tuple) else (out,)
            layer.zero_grad()
            given[0].sum().backward()
            grads = {n: p.grad for n, p in (*layer.named_parameters(), ("x", x)) if p.grad is not None}
            found.append(likes({**{str(n): y for n, y in enumerate(given)}, **grads}))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    with_data = trained(name, "cpu", nullcontext())
    assert trained(name, "meta", nullcontext()) == [moved(found, "meta") for found in with_data]
    assert trained(name, "cpu", FakeTensorMode()) == with_data


def test_statistics_of_a_module() -> None:
    layer, x = MultiHeadAttention(24, 4, device="meta"), torch.ones(2, *TOKENS, device="meta")
    found = layer(x, return_statistics=True)[1]
    assert {(*x.shape,) for x in found} == {(2, 4, 6)}


# ---------------------------------------------------------------------------------------------- Python numbers


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_what_adds_up_python_numbers_refuses(device: str) -> None:
    def run(name: str) -> None:
        x = torch.ones(2, 3, device="cpu" if device == "fake" else device)
        if name == "capture":
            layer = MultiHeadAttention(24, 4, device=x.device)
            with capture(layer):
                layer(x.new_ones(2, *TOKENS))
        elif name == "Concentration":
            analysis.Concentration([10]).update(x)
        elif name == "Anisotropy":
            analysis.Anisotropy().update(x)
        else:
            analysis.VarianceRatio().update(x, x)

    for name in ("capture", "Concentration", "Anisotropy", "VarianceRatio"):
        with (
            FakeTensorMode() if device == "fake" else nullcontext(),
            pytest.raises(TypeError, match=rf"^{name}: adds up Python numbers and needs an array whose values"),
        ):
            run(name)
