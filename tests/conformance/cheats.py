"""Adapters that are right when they are looked at once, each with one way to be so without being right."""

import os
import random
import sys
from typing import Any

import numpy as np

from attnkit_conformance.adapter import Unsupported


class Honest:
    """Plain softmax attention and its gradients."""

    name, dtypes, ops = "cheat", ("float32", "float64"), ("softmax_attention",)

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return x

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        if arrays.keys() != {"q", "k", "v"} or params.keys() - {"scale"}:
            raise Unsupported("only q, k, v and scale")
        return {"o": weights(**arrays, **params) @ arrays["v"]}

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        q, k, v, do = arrays["q"], arrays["k"], arrays["v"], cotangents["o"]
        if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
            raise Unsupported("no gradients of arrays that are broadcast")
        w = weights(**arrays, **params)
        dw = do @ v.mT if hasattr(v, "mT") else do @ v.swapaxes(-1, -2)
        ds = w * (dw - (w * dw).sum(-1, keepdims=True)) * scale_of(q, **params)
        return {"q": ds @ k, "k": ds.swapaxes(-1, -2) @ q, "v": w.swapaxes(-1, -2) @ do}


def scale_of(q: np.ndarray, scale: float | None = None) -> Any:
    return q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)


def weights(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None) -> np.ndarray:
    s = q @ k.swapaxes(-1, -2) * scale_of(q, scale)
    e = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-30)


def baseline(arrays: Any, params: Any) -> np.ndarray:
    return weights(**arrays, **params) @ arrays["v"]


class Remembers(Honest):
    """Results by the shapes of what it is given."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        key = tuple((x.shape, x.dtype.name) for x in arrays.values())
        return {n: x.copy() for n, x in self.known.setdefault(key, super().call(op, arrays, params)).items()}


class CallsBaseline(Honest):
    def call(self, op: str, arrays: Any, params: Any) -> Any:
        super().call(op, arrays, params)
        return {"o": baseline(arrays, params)}


class CallsReference(Honest):
    def call(self, op: str, arrays: Any, params: Any) -> Any:
        import attnkit_reference

        super().call(op, arrays, params)
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        return {"o": attnkit_reference.softmax_attention(**wide, **params).astype(arrays["q"].dtype)}


class ChangesInputs(Honest):
    """Scales q where it lies."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        result = super().call(op, arrays, params)
        arrays["q"][...] *= 0.5
        return result


class ReusesMemory(Honest):
    """Writes into the same array whenever shapes are the same."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        o = super().call(op, arrays, params)["o"]
        held = self.known.setdefault((o.shape, o.dtype), o)
        held[...] = o
        return {"o": held}


class LeavesUnwritten(Honest):
    """The last row of the output is what was in memory."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        right = super().call(op, arrays, params)["o"]
        o = np.empty(right.shape, right.dtype)
        o[..., :-1, :] = right[..., :-1, :]
        return {"o": o}


class Races(Honest):
    """Now and then an entry is wrong."""

    every, by = 20, 1.1

    def __init__(self) -> None:
        self.random = random.Random(1)

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        result = super().call(op, arrays, params)
        if self.random.random() < 1 / self.every:
            result["o"].flat[:1] *= self.by
        return result


class RacesRarely(Races):
    every = 200


class Wobbles(Races):
    """Now and then the last bits of an entry are others."""

    by = 1 + 3e-7


class Tires(Honest):
    """Wrong after many calls."""

    lasts = 1500

    def __init__(self) -> None:
        self.calls = 0

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        self.calls += 1
        result = super().call(op, arrays, params)
        return {"o": result["o"] * 1.1} if self.calls > self.lasts else result


class TiresSoon(Tires):
    lasts = 100


class Picks(Honest):
    """Refuses what it would get wrong: half of all values."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        if arrays["q"].flat[0] > 0:
            raise Unsupported("these are hard")
        return super().call(op, arrays, params)


class ReplacesTheJudge(Honest):
    """Every answer is right when nobody compares."""

    def __init__(self) -> None:
        from attnkit_conformance import core

        core.judge_arrays = lambda *arguments: None  # type: ignore[assignment]

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return {"o": 0 * super().call(op, arrays, params)["o"]}


class Message:
    def __reduce__(self) -> Any:
        return os.putenv, ("HARMED", "1")


class SendsCode(Honest):
    """What it sends would run in whoever reads it."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        for module in ("__main__", "attnkit_conformance.adapters.repetition"):
            sys.modules[module].pack = lambda arrays: Message()  # type: ignore[attr-defined]
        return super().call(op, arrays, params)
