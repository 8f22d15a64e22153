"""fla-core's plain functions of attention by pairs, on a CPU: softmax with a sink, forgetting, stick-breaking.

All are causal with as many queries as keys (naive_parallel_attn may also not be causal), and take neither masks nor
biases. naive_forgetting_attn computes in float32 for any input, and returns it.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Params, option, window_sides
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer

IMPORTS = ("import importlib.metadata", "import importlib.util", "from pathlib import Path")
VERSION = 'importlib.metadata.version("fla-core")'
PLAIN = ("q", "k", "v", "scale", "enable_gqa")
SOFTMAX, FORGETTING, STICK = "softmax_attention", "forgetting_attention", "stick_breaking_attention"
OWN = {
    SOFTMAX: ("causal", "window", "sink"),
    FORGETTING: ("window", "log_forget"),
    STICK: ("attend_current", "return_remainder"),
}


def naive(family: str) -> ModuleType:
    """fla/ops/<family>/naive.py."""
    package = importlib.util.find_spec("fla")
    folder = Path(str(package and package.origin)).parent / "ops" / family
    spec = importlib.util.spec_from_file_location(f"fla_naive_{family}", folder / "naive.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} has no naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loading(family: str) -> tuple[str, ...]:
    """`naive` in a program."""
    return (
        f'path = Path(importlib.util.find_spec("fla").origin).parent / "ops" / "{family}" / "naive.py"',
        'spec = importlib.util.spec_from_file_location("naive", path)  # fla itself imports Triton',
        "naive = importlib.util.module_from_spec(spec)",
        "spec.loader.exec_module(naive)",
    )


def layout_reason(arrays: Tensors, params: Params) -> str | None:
    """Shapes that are not (B, T, H, K)."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    if any(x.ndim != 4 or x.shape[0] != q.shape[0] for x in (q, k, v)) or k.shape[1] != v.shape[1]:
        return "takes (B, T, H, K) arrays"
    if q.shape[1] != k.shape[1] and not params.get("enable_gqa"):
        return "heads do not broadcast"
    return None


def time_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


class Pairs(TorchPeer):
    """An op by one function of q, k, v in (B, T, H, K)."""

    def __init__(self, name: str, op: str, family: str, function: str, without: tuple[str, ...] = ()) -> None:
        self.function, self.family, self.ops, self.without = getattr(naive(family), function), family, (op,), without
        super().__init__(name, DTYPES, f"fla-core {version('fla-core')}, {function}, CPU, autograd")

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Masks, biases, windows that are not causal, and other than as many queries as keys."""
        numbers = {name: x for name, x in arrays.items() if name != "sink"}  # a sink may be an array
        reason = refusal(numbers, params, (*PLAIN, *OWN[op])) or layout_reason(arrays, params)
        q, k = arrays["q"], arrays["k"]
        ordered = op != SOFTMAX or bool(params.get("causal"))
        if reason is None and not k.shape[-2]:
            return "no keys have no maximum"
        if reason is None and ordered and q.shape[-2] != k.shape[-2]:
            return "causal self-attention only"
        if reason is None and "window" in params and not ordered:
            return "windows are causal"
        return reason

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        q, k, v = (time_first(arrays[name]) for name in ("q", "k", "v"))
        o = self.function(q, k, v, **{name: x for name, (x, _) in self.options(op, arrays, params).items()})
        if isinstance(o, torch.Tensor):
            return {"o": time_first(o)}
        return {"o": time_first(o[0])} | ({"r": time_first(o[1])} if params.get("return_remainder") else {})

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        options = ", ".join(f"{name}={text}" for name, (_, text) in self.options(op, arrays, params).items())
        call = f"naive.{self.function.__name__}(*(x.transpose(1, 2) for x in (q, k, v)), {options})"
        several = self.function.__name__ != "naive_forgetting_attn"
        lines = (*loading(self.family), f"{'o, other' if several else 'o'} = {call}")
        return Source("torch", IMPORTS, lines, "o.transpose(1, 2)", VERSION, others={"r": "other.transpose(1, 2)"})

    def options(self, op: str, arrays: Tensors, params: Params) -> dict[str, tuple[object, str]]:
        """The keywords of a call: values, and their texts in a program."""
        q = arrays["q"]
        given = {name: params[name] for name in ("scale", "attend_current") if name in params}
        if op == SOFTMAX:
            given["causal"] = bool(params.get("causal"))
        if (left := window_sides(params)[0]) is not None:
            given["window_size"] = min(left, q.shape[-2]) + 1
        options: dict[str, tuple[object, str]] = {name: (x, repr(x)) for name, x in given.items()}
        if op == FORGETTING:
            gates = arrays["log_forget"].expand(q.shape[:-1])
            options["g"] = time_first(gates), "log_forget.expand(q.shape[:-1]).transpose(1, 2)"
        if "sink" in arrays:
            options["sink_bias"] = arrays["sink"].expand(q.shape[1]), "sink.expand(q.shape[1])"
        elif params.get("sink") is not None:
            number = option(params, "sink", 0.0)
            text = f"torch.full((q.shape[1],), {number!r}, dtype=q.dtype)".replace("-inf", "-torch.inf")
            options["sink_bias"] = torch.full((q.shape[1],), number, dtype=q.dtype), text
        return options


def adapters() -> list[Adapter]:
    """Softmax with and without sinks, forgetting attention by two functions, stick-breaking."""
    return [
        Pairs("fla-softmax", SOFTMAX, "attn", "naive_parallel_attn", ("return_lse",)),
        Pairs("fla-gates", FORGETTING, "attn", "naive_parallel_attn", ("return_lse",)),
        Pairs("fla-forgetting", FORGETTING, "forgetting_attn", "naive_forgetting_attn", ("return_lse",)),
        Pairs("fla-stickbreaking", STICK, "stickbreaking_attn", "naive_stickbreaking_attn"),
    ]
