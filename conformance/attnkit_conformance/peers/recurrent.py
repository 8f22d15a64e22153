"""Shared by adapters of recurrences in torch: linear attention that fades, gated linear attention, the delta rule.

A peer is a `Recurrence`: a function of q, k, v, gates and perhaps a state. None takes a mask: the adapter sets k, v,
gates and β of hidden tokens to 0, and q and o of queries that see nothing. Gates that a call lacks are 0. For
linear_attention the adapter applies φ and appends a one to the values, whose sums are the denominators and the second
part of the state. A function that takes no scale gets it in q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import elu, pad, relu

from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Keywords, Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

LINEAR, GATED, DELTA = "linear_attention", "gated_linear_attention", "delta_attention"
FEATURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu_plus_one": lambda x: elu(x) + 1,
    "relu": relu,
    "identity": lambda x: x,
}
FEATURE_TEXTS = {"elu_plus_one": "torch.nn.functional.elu(x) + 1", "relu": "torch.relu(x)", "identity": "x"}
TAKEN = ("q", "k", "v", "mask", "key_lengths", "causal", "scale", "chunk_size", "return_state")
OWN = {
    LINEAR: ("log_decay", "feature_map", "normalize", "eps", "initial_S", "initial_z"),
    GATED: ("log_gate", "initial_S"),
    DELTA: ("beta", "log_decay", "initial_S"),
}
GATE = {LINEAR: "log_decay", GATED: "log_gate", DELTA: "log_decay"}
NOTHING, NUMBER, VECTOR = "nothing", "a number per token", "a vector per token"

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Recurrence:
    """A function and its arguments. A state fades by `gate`, the keyword `gate_name`. The keywords `chunks` are
    tokens of a chunk, as many as a call asks for, `chunk` by default; where they have to divide all, the largest
    divisor. `text` is the function in a program, after `imports` and `lines`; `version` an expression.
    """

    name: str
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    op: str
    gate: str = NUMBER
    gate_name: str = "g"
    heads_first: bool = False  # (B, H, T, d) instead of (B, T, H, d)
    scales: bool = False
    begins: bool = True  # takes a state
    ends: bool = True  # returns one
    chunks: tuple[str, ...] = ()
    chunk: int = 64
    divides: bool = False
    text: str = ""
    imports: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    version: str = ""

    def sizes(self, tokens: int, params: Params) -> dict[str, int]:
        """The sizes of chunks."""
        size = option(params, "chunk_size", self.chunk)
        if self.divides:
            size = next(n for n in range(min(tokens, size), 0, -1) if tokens % n == 0)
        return dict.fromkeys(self.chunks, size)


class Recurrent(TorchPeer):
    """The op of one function."""

    def __init__(self, own: Recurrence, dtypes: tuple[str, ...], package: str) -> None:
        self.own, self.ops = own, (own.op,)
        self.without = () if own.ends else ("return_state",)
        super().__init__(own.name, dtypes, f"{package}, {own.function.__name__}, CPU, autograd")

    # ------------------------------------------------------------------------------------ what it supports

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Arguments, shapes and gates beyond those of the function."""
        own = [name for name in OWN[op] if self.own.begins or not name.startswith("initial_")]
        q, k, v = (arrays[name] for name in "qkv")
        mask = arrays.get("mask")
        if (reason := refusal(arrays, params, (*TAKEN, *own))) is not None:
            return reason
        if any(x.ndim != 4 or x.shape[:2] != q.shape[:2] for x in (q, k, v)):
            return "takes four axes, with as many heads everywhere"
        if params.get("causal", op != LINEAR) is not True or q.shape[-2] != k.shape[-2] or not q.shape[-2]:
            return "causal self-attention only"
        if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
            return "takes no mask of pairs"
        if "scale" in params and not self.own.scales and q.dtype.itemsize < 4:
            return "takes no scale, which q would be rounded with"
        return self.other_gates(op, arrays, params)

    def other_gates(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call has other gates than the function."""
        names = [name for name in ("beta", GATE[op]) if name in arrays]
        if any(arrays[name].ndim > 2 and arrays[name].shape[:2] != arrays["k"].shape[:2] for name in names):
            return "gates have the heads of k and v"
        if GATE[op] not in {*arrays, *params}:  # gates of 0
            return None
        given = VECTOR if GATE[op] in arrays and arrays[GATE[op]].ndim == 4 else NUMBER
        return None if given == self.own.gate else f"fades by {self.own.gate}"

    # ------------------------------------------------------------------------------------ a call

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        (q, k, v), gates, live = self.without_hidden(op, arrays, params)
        options: Keywords = self.own.sizes(q.shape[-2], params)
        if self.own.scales:
            options["scale"] = scale(op, params, q)
        else:
            q = q * (scale(op, params, q) * q.shape[-1] ** 0.5)
        if op == LINEAR:
            v = pad(v, (0, 1), value=1.0)
        if self.own.begins:
            options |= {"initial_state": first(arrays), "output_final_state": True}
        o, S = self.own.function(*(self.swap_axes(x) for x in (q, k, v)), **gates, **options)
        o = torch.where(live, self.swap_axes(o), 0)  # for gradients, where cotangents of such rows are NaN
        return self.answer(op, o, S, params)

    def swap_axes(self, x: torch.Tensor) -> torch.Tensor:
        """Between the layouts."""
        return x if self.own.heads_first else x.transpose(1, 2)

    def without_hidden(self, op: str, arrays: Tensors, params: Params) -> tuple[Rows, Tensors, torch.Tensor]:
        """φ(q), φ(k) and v, and gates, without hidden tokens; and which queries see anything."""
        q, k, v = (arrays[name] for name in "qkv")
        phi, keys = FEATURES[feature_map(op, params)], visible_keys(arrays, params)
        valid = torch.ones((), dtype=torch.bool) if keys is None else keys.expand(*keys.shape[:-2], 1, k.shape[-2]).mT
        valid = valid.expand(*k.shape[:-1], 1)
        live = valid.cumsum(-2) > 0 if "initial_S" not in arrays else torch.ones_like(valid)
        q = torch.where(live, phi(torch.where(live, q, 0)), 0)
        k, v = torch.where(valid, phi(torch.where(valid, k, 0)), 0), torch.where(valid, v, 0)
        gates = {"beta": arrays["beta"]} if op == DELTA else {}
        if self.own.gate != NOTHING:
            gates[self.own.gate_name] = gate(self.own, arrays, params)
        gates = {name: torch.where(valid if x.ndim == 4 else valid[..., 0], x, 0) for name, x in gates.items()}
        return (q, k, v), {name: self.swap_axes(x) for name, x in gates.items()}, live

    def answer(self, op: str, o: torch.Tensor, S: torch.Tensor | None, params: Params) -> Tensors:
        """The outputs by name; of linear attention from sums with denominators."""
        if op != LINEAR:
            parts = {"o": o} if S is None else {"o": o, "S": S}
        else:
            o, total = o[..., :-1], o[..., -1:]
            o = o / (total + option(params, "eps", 1e-6)) if normalizes(params) else o
            parts = {"o": o} if S is None else {"o": o, "S": S[..., :-1], "z": S[..., -1]}
        return parts if params.get("return_state") else {"o": parts["o"]}

    # ------------------------------------------------------------------------------------ a program

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        names = ["q", "k", "v", *(["beta"] if op == DELTA else []), *([] if self.own.gate == NOTHING else [GATE[op]])]
        texts, lines = {name: name for name in names}, [*self.own.lines]
        texts[GATE[op]] = gate_text(self.own, arrays, params)
        if visible_keys(arrays, params) is not None:
            lines += HIDE
            texts = {name: f"keep({text})" for name, text in texts.items()}
            texts["q"] = "q" if "initial_S" in arrays else "look(q)"
        if op == LINEAR:
            lines.append(f"phi = lambda x: {FEATURE_TEXTS[feature_map(op, params)]}")
            texts["k"] = "phi(k)" if texts["k"] == "k" else "keep(phi(keep(k)))"
            texts |= {"q": f"phi({texts['q']})", "v": f"torch.nn.functional.pad({texts['v']}, (0, 1), value=1.0)"}
        turn = "{}" if self.own.heads_first else "{}.transpose(1, 2)"
        options = [f"{self.keyword(op, name)}={turn.format(texts[name])}" for name in names[3:]]
        options += [f"{name}={n!r}" for name, n in self.own.sizes(arrays["q"].shape[-2], params).items()]
        of_q = scale(op, params, arrays["q"])
        if self.own.scales:
            options.append(f"scale={of_q!r}")
        elif (factor := of_q * arrays["q"].shape[-1] ** 0.5) != 1.0:
            texts["q"] = f"({texts['q']} * {factor!r})"
        joined = "torch.cat([initial_S, initial_z[..., None]], -1)" if op == LINEAR else "initial_S"
        state = f"initial_state={joined if 'initial_S' in arrays else None}"
        options += [state, "output_final_state=True"] if self.own.begins else []
        call = ", ".join([*(turn.format(texts[name]) for name in "qkv"), *options])
        lines += [f"o, S = {self.own.text}({call})", *(["o = o.transpose(1, 2)"] if not self.own.heads_first else [])]
        lines += ["o = look(o)"] if texts["q"].startswith(("look", "phi(look", "(look")) else []
        result, others = "o", {"S": "S"}
        if op == LINEAR:
            total = f" / (o[..., -1:] + {params.get('eps', 1e-6)!r})" if normalizes(params) else ""
            result, others = f"o[..., :-1]{total}", {"S": "S[..., :-1]", "z": "S[..., -1]"}
        return Source("torch", self.own.imports, tuple(lines), result, self.own.version, others=others)

    def keyword(self, op: str, name: str) -> str:
        """The function's name of a gate."""
        return self.own.gate_name if name == GATE[op] else name


HIDE = (
    "valid = torch.atleast_2d(seen)[..., -1:, :].expand(*k.shape[:2], 1, k.shape[2]).mT  # the keys of the last query",
    "keep = lambda x: torch.where(valid if x.ndim == 4 else valid[..., 0], x, 0)",
    "look = lambda x: torch.where(valid.cumsum(-2) > 0, x, 0)",
)


def feature_map(op: str, params: Params) -> str:
    """The name of φ."""
    return str(params.get("feature_map", "elu_plus_one")) if op == LINEAR else "identity"


def normalizes(params: Params) -> bool:
    """The default of semantics B."""
    normalize = params.get("normalize")
    return params.get("feature_map") != "identity" if normalize is None else bool(normalize)


def scale(op: str, params: Params, q: torch.Tensor) -> float:
    """1 for features, 1/√d otherwise."""
    return option(params, "scale", 1.0 if op == LINEAR else q.shape[-1] ** -0.5)


def gate(own: Recurrence, arrays: Tensors, params: Params) -> torch.Tensor:
    """What the state fades by at every token: a decay of linear attention may be one number, or one for each head."""
    x, k = arrays.get(GATE[own.op]), arrays["k"]
    if x is None:
        x = torch.tensor(params.get(GATE[own.op], 0.0), dtype=k.dtype)
    x = x[:, None] if x.ndim == 1 else x
    return x.expand(k.shape if own.gate == VECTOR else k.shape[:-1])


def gate_text(own: Recurrence, arrays: Tensors, params: Params) -> str:
    """`gate` in a program."""
    name, shape = GATE[own.op], "k.shape" if own.gate == VECTOR else "k.shape[:-1]"
    if name not in arrays:
        return f"torch.full({shape}, {params.get(name, 0.0)!r}, dtype=k.dtype)"
    few = arrays[name].ndim < 3
    return f"{name}{'[:, None]' if arrays[name].ndim == 1 else ''}.expand({shape})" if few else name


def first(arrays: Tensors) -> torch.Tensor | None:
    """The state before the first token; of linear attention with the sums of keys as a last column."""
    if "initial_z" not in arrays:
        return arrays.get("initial_S")
    return torch.cat([arrays["initial_S"], arrays["initial_z"][..., None]], dim=-1)
