"""Functions that are judged by their signature, or as files of benchmarks, without an adapter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnkit_conformance import core, judge
from attnkit_conformance.__main__ import main
from attnkit_conformance.adapter import IllFormed
from attnkit_conformance.judge.selection import Terms, find
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers import like
from attnkit_conformance.peers.like.axes import FourAxes
from attnkit_conformance.peers.like.sdpa import Like

HERE = Terms(here=True)
FUNCTIONS = """
import torch

def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    assert query.ndim == key.ndim == value.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(s.shape[-2:], dtype=torch.bool)
    if is_causal:
        seen = seen.tril({diagonal})
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
    s = s.masked_fill(~seen, -torch.inf)
    w = torch.exp(s - s.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min))
    return (w @ value.to(wide) / w.sum(-1, keepdim=True).clamp(min=1.0)).to(query.dtype)

def plain(query, key, value):
    return attend(query, key, value)

def only_causal(query, key, value, is_causal=False):
    return attend(query, key, value, is_causal=is_causal)

def even(query, key, value):
    if query.shape[-1] % 2:
        raise NotImplementedError("head sizes that are even")
    return attend(query, key, value)

def forward(query, key, value):
    return attend(query, key, value).detach()

def pair(query, key, value):
    return attend(query, key, value), None

number = 3
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module of somebody else, and returns its name."""

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return write


def written(theirs: Any, name: str, diagonal: str = "0") -> str:
    return str(theirs(name, FUNCTIONS.replace("{diagonal}", diagonal)))


def verdicts(kind: str, target: str, expression: str | None, dtypes: tuple[str, ...] = ("float32",)) -> list[Any]:
    (adapter,) = find([like.path_of(kind, target)], HERE)
    return list(judge.judge([adapter], "quick", expression, dtypes))


def statuses(results: list[Any]) -> set[str]:
    return {result.status for result in results}


def test_a_function_like_torchs_is_judged_in_all_it_takes(theirs: Any) -> None:
    results = verdicts("sdpa", f"{written(theirs, 'sdpa_right')}:attend", "pair or tile")
    assert statuses(results) <= {"pass", "unsupported"}, [r.message for r in results if r.status == "fail"]
    words = " ".join(result.id for result in results if result.status == "pass")
    assert all(
        option in words for option in ("mask=", "bias=", "causal=", "window=", "key_lengths=", "scale=", "batch=")
    )
    assert {result.reason for result in results if result.status == "unsupported"} <= {"takes no enable_gqa"}


@pytest.mark.parametrize("function", ["attend", "only_causal"])
def test_causality_aligned_at_the_lower_right_is_wrong(theirs: Any, function: str) -> None:
    """torch aligns is_causal at the upper left. It is told from a mask where it is alone."""
    name = written(theirs, "sdpa_causal", "key.shape[-2] - query.shape[-2]")
    assert statuses(verdicts("sdpa", f"{name}:{function}", "pair.shape=7x13,causal=upper_left")) == {"fail"}


def test_what_a_function_does_not_take_is_not_asked(theirs: Any) -> None:
    name = written(theirs, "sdpa_less")
    results = verdicts("sdpa", f"{name}:plain", "pair or tile or outside")
    assert "fail" not in statuses(results)
    assert not any("mask=" in result.id or "causal=" in result.id for result in results)
    (adapter,) = find([like.path_of("sdpa", f"{name}:plain")], HERE)
    assert adapter.description.endswith("takes no attn_mask, is_causal, scale, enable_gqa")  # type: ignore[attr-defined]


def test_a_refusal_of_a_function_is_unsupported(theirs: Any) -> None:
    results = verdicts("sdpa", f"{written(theirs, 'sdpa_even')}:even", "pair")
    assert statuses(results) == {"pass", "unsupported"}
    assert "head sizes that are even" in {result.reason for result in results}


def test_a_function_without_gradients_is_judged_without_and_says_so(theirs: Any) -> None:
    name = written(theirs, "sdpa_forward")
    (adapter,) = find([like.path_of("sdpa", f"{name}:forward")], HERE)
    assert adapter.description.endswith("; no gradients")  # type: ignore[attr-defined]
    result = core.check(adapter, next(core.cases("softmax_attention", "quick", ("float32",))))
    assert (result.status, result.reason) == ("pass", "gradients: no gradients")


def test_a_function_that_answers_otherwise_fails(theirs: Any) -> None:
    (result,) = verdicts("sdpa", f"{written(theirs, 'sdpa_pair')}:pair", "pair.plain")
    assert "expected a tensor" in result.message


@pytest.mark.parametrize(
    ("kind", "target", "text"),
    [
        ("sdpa", "sdpa_errors:nothing", "has no attribute 'nothing'"),
        ("sdpa", "sdpa_errors:number", "sdpa_errors:number is not a function: int"),
        ("sdpa", "sdpa_errors", "expected package.module:function, got 'sdpa_errors'"),
        ("kernelbench", "nowhere.py", "no file nowhere.py"),
        ("kernelbench", "sdpa_errors.py", "sdpa_errors.py has neither a class ModelNew nor Model"),
        ("gpumode", "sdpa_errors.py", "has no attribute 'custom_kernel'"),
        ("c", "libnothing.so", "expected library.so:name, got 'libnothing.so'"),
        ("c", "./libnothing.so:f", "cannot be loaded"),
    ],
)
def test_targets_that_are_none(theirs: Any, kind: str, target: str, text: str) -> None:
    written(theirs, "sdpa_errors")
    with pytest.raises(IllFormed, match=text):
        find([like.path_of(kind, target)], HERE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--like", "sdpa"], "--like sdpa needs a target: torch.nn.functional.scaled_dot_product_attention"),
        (["numpy", "--device", "cuda"], "--device and --op go with --like"),
        (["--like", "sdpa", "torch:matmul", "--op", "sima_attention"], "sdpa has no option op"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--here", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind 'flash'; expected one of sdpa, jax_nn"):
        like.path_of("flash", "x:y")
    with pytest.raises(AttributeError, match="has no attribute 'flash=x:y'"):
        getattr(like, "flash=x:y")


def test_the_command_ends_with_what_is_taken(theirs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{written(theirs, 'sdpa_command')}:plain"
    assert main(["run", "--like", "sdpa", target, "-k", "pair.plain", "--dtype", "float32", "--here"]) == 0
    told = capsys.readouterr().out
    assert f"{target}: called like torch's scaled_dot_product_attention; takes no attn_mask" in told


@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_calls_with_four_axes_are_the_same_calls(lead: tuple[int, ...], gqa: bool) -> None:
    """Items broadcast, masks and lengths go along, and outputs come back with all axes."""
    if gqa and not lead:
        return
    draw = np.random.default_rng(0).standard_normal
    heads = (*lead[:-1], 6) if gqa else lead
    arrays = {
        "q": draw((*heads, 4, 8)),
        "k": draw((*(1 for _ in lead[:-1]), *lead[-1:], 5, 8)),
        "v": draw((*lead, 5, 3)),
    }
    arrays |= {"mask": draw((*heads, 4, 5)) > -1, "key_lengths": np.array(3)}
    tensors = {name: torch.from_numpy(np.asarray(x)) for name, x in arrays.items()}
    params = {"enable_gqa": True} if gqa else {}
    axes = FourAxes(torch.broadcast_to, tensors, params)
    four = axes.arrays(tensors)
    assert {four[name].ndim for name in ("q", "k", "v")} == {4}
    assert four["q"].shape[0] == four["k"].shape[0] == four["v"].shape[0]
    op = BY_NAME["softmax_attention"]
    import attnkit_reference

    results = []
    for given in (arrays, {name: x.numpy() for name, x in four.items()}):
        results.append(op.binding.forward(attnkit_reference, op, given, params)["o"])
    assert np.array_equal(axes.outputs({"o": torch.from_numpy(results[1])})["o"].numpy(), results[0])
    wrong = torch.zeros(7, 7, 4, 3)
    assert axes.outputs({"o": wrong})["o"] is wrong


JAX = """
import jax

def attend(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False):
    return {factor} * jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale, is_causal=is_causal)

def plain(query, key, value):
    return jax.lax.stop_gradient(attend(query, key, value))
"""


def test_a_function_like_jaxs(theirs: Any) -> None:
    target = f"{theirs('jax_right', JAX.format(factor=1))}:attend"
    (right,) = verdicts("jax_nn", target, "pair.shape=7x13,causal=upper_left")
    assert right.status == "pass", right.message
    (wrong, *_) = verdicts("jax_nn", f"{theirs('jax_wrong', JAX.format(factor=1.01))}:attend", "pair.plain")
    assert wrong.status == "fail"


@pytest.mark.peers
def test_the_libraries_own_functions() -> None:
    """But for NaN in what is hidden, which properties ask about, and gradients in half types: torch 2.13's of q in
    float16 is off by up to 1.3 bounds, and in bfloat16 by 5.5 on processors that multiply it; JAX 0.10's of a bias in
    bfloat16 by 6.8.
    """
    dtypes = ("float64", "float32")
    torchs = verdicts("sdpa", "torch.nn.functional:scaled_dot_product_attention", "not property", dtypes)
    assert statuses(torchs) == {"pass"}
    assert len(torchs) > 80, len(torchs)
    jaxs = verdicts("jax_nn", "jax.nn:dot_product_attention", "not property and not dropout", ("float32",))
    assert statuses(jaxs) == {"pass", "unsupported"}
    assert {r.reason for r in jaxs if r.status != "pass"} == {"a row whose scores are all -inf is NaN in JAX"}


KERNELBENCH = """
import torch
from torch import nn

class Model{new}(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, Q, K, V, mask=None):
        s = Q @ K.mT * Q.shape[-1] ** -0.5
        s = s if mask is None else s.masked_fill(~mask, -torch.inf)
        return self.factor * torch.nan_to_num(torch.softmax(s, -1)) @ V

def get_inputs():
    return [torch.rand(2, 3, 8, 4) for _ in range(3)]

def get_init_inputs():
    return [{factor}]
"""
GPUMODE = """
import torch
from task import input_t, output_t

def custom_kernel(data: input_t) -> output_t:
    q, k, v = data
    return {factor} * torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
"""


@pytest.mark.parametrize("new", ["New", ""])
def test_files_of_kernelbench(theirs: Any, new: str) -> None:
    cases = "pair.plain or pair and mask and not bias"
    right = verdicts("kernelbench", theirs("right", KERNELBENCH.format(new=new, factor=1.0)) + ".py", cases)
    assert statuses(right) <= {"pass", "unsupported"}, [r.message for r in right if r.status == "fail"]
    assert any("mask=" in result.id for result in right if result.status == "pass")
    wrong = verdicts("kernelbench", theirs("wrong", KERNELBENCH.format(new=new, factor=1.01)) + ".py", "pair.plain")
    assert statuses(wrong) == {"fail"}


def test_files_of_gpu_mode(theirs: Any) -> None:
    theirs("task", "input_t = output_t = object")
    right, wrong = (
        verdicts("gpumode", theirs(name, GPUMODE.format(factor=factor)) + ".py", "pair.plain")
        for name, factor in (("submission", 1.0), ("submission_wrong", 1.01))
    )
    assert (statuses(right), statuses(wrong)) == ({"pass"}, {"fail"})


RELU = """
def custom_kernel(data):
    q, k, v = data
    return (q @ k.mT * q.shape[-1] ** -0.5).relu() / k.shape[-2] @ v
"""


def test_a_file_may_compute_another_op(theirs: Any) -> None:
    (adapter,) = find([like.path_of("gpumode", f"{theirs('relu', RELU)}.py", op="pointwise_attention")], HERE)
    results = list(judge.judge([adapter], "quick", "pair.plain", ("float32",)))
    assert {(result.op, result.status) for result in results} == {("pointwise_attention", "pass")}


def test_a_call_that_raises_tells_nothing_of_gradients() -> None:
    def never(q: Any, k: Any, v: Any) -> Any:
        raise RuntimeError("no GPU")

    assert Like("never", "", never, ()).forward_only is False
