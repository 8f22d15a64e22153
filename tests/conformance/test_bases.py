"""Adapters that are a class with `call` alone, and a shared library that is none."""

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnkit_conformance import core, judge
from attnkit_conformance.adapter import IllFormed, Unsupported
from attnkit_conformance.adapters.bases.c import Guarded, SharedLibrary
from attnkit_conformance.adapters.bases.jax import JaxAdapter
from attnkit_conformance.adapters.bases.numpy import NumpyAdapter
from attnkit_conformance.adapters.bases.torch import TorchAdapter, TorchDerivatives
from attnkit_conformance.judge.selection import what_is_wrong

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "c" / "attention.c"
OP = "softmax_attention"


def plain(arrays: Any, params: Any) -> tuple[Any, Any, Any]:
    if arrays.keys() != {"q", "k", "v"} or params:
        raise Unsupported("plain attention alone")
    return arrays["q"], arrays["k"], arrays["v"]


class Torch(TorchAdapter):
    name, dtypes, ops, factor = "torch_base", ("float32",), (OP,), 1.0

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        q, k, v = plain(arrays, params)
        return {"o": self.factor * torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v}


class Twice(TorchDerivatives, Torch):
    name, dtypes = "torch_twice", ("float64",)


class Jax(JaxAdapter):
    name, ops, factor = "jax_base", (OP,), 1.0

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        import jax

        q, k, v = plain(arrays, params)
        return {"o": self.factor * jax.nn.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v}


class Numpy(NumpyAdapter):
    name, dtypes, ops, factor = "numpy_base", ("float32",), (OP,), 1.0

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        q, k, v = plain(arrays, params)
        w = np.exp(np.einsum("...ld,...sd->...ls", q, k) * np.float32(q.shape[-1] ** -0.5))
        return {"o": np.float32(self.factor) * (w / w.sum(-1, keepdims=True)) @ v}


def verdicts(adapter: Any, expression: str = "pair.plain") -> list[core.CaseResult]:
    assert list(what_is_wrong(adapter)) == []
    return list(judge.judge([adapter], "quick", expression, adapter.dtypes, ops=(OP,)))


@pytest.mark.parametrize("base", [Torch, pytest.param(Jax, marks=pytest.mark.peers), Numpy])
def test_a_call_alone_is_an_adapter(base: Any) -> None:
    (right,) = verdicts(base())
    assert (right.status, right.reason) == ("pass", "gradients: no gradients" if base is Numpy else "")
    wrong = base()
    wrong.factor = 1.01
    (told,) = verdicts(wrong)
    gradients = [] if base is Numpy else ["dq", "dk", "dv"]
    assert [text.partition(":")[0] for _, text in told.failures] == ["o", *gradients]


def test_without_gradients_a_base_refuses_them_if_it_says_so() -> None:
    class Forward(Torch):
        def call(self, op: str, arrays: Any, params: Any) -> Any:
            return {name: x.detach() for name, x in super().call(op, arrays, params).items()}

    (told,) = verdicts(Forward())
    assert (told.status, {text.partition(":")[0] for _, text in told.failures}) == ("fail", {"dq", "dk", "dv"})
    said = Forward()
    said.forward_only = True
    assert [(result.status, result.reason) for result in verdicts(said)] == [("pass", "gradients: no gradients")]


def test_derivatives_of_torch_are_judged_and_a_wrong_one_is_told() -> None:
    results = verdicts(Twice(), "jvp.plain or hvp.plain")
    assert {result.id.split("/")[2]: result.status for result in results} == dict.fromkeys(
        ("jvp.plain", "hvp.plain"), "pass"
    )

    class Stopped(Twice):
        def call(self, op: str, arrays: Any, params: Any) -> Any:
            return super().call(op, {**arrays, "v": arrays["v"].detach()}, params)

    assert {result.status for result in verdicts(Stopped(), "jvp.plain")} == {"fail"}


@pytest.mark.parametrize("base", [TorchAdapter, JaxAdapter, NumpyAdapter])
def test_a_base_without_a_call_fails(base: Any) -> None:
    class Bare(base):
        dtypes, ops = ("float32",), (OP,)

    (told,) = verdicts(Bare())
    assert "NotImplementedError: Bare has no call" in told.message


# ------------------------------------------------------------------------------------------------------ the C interface


def compiled(folder: Path, source: str) -> Path:
    """A shared library of a C source."""
    (folder / "mine.c").write_text(source)
    library = folder / "libmine.so"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(folder / "mine.c"), "-lm"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> SharedLibrary:
    return SharedLibrary(compiled(tmp_path_factory.mktemp("example"), EXAMPLE.read_text()), "attention")


def test_the_example_in_c_is_right_in_all_that_the_interface_has(library: SharedLibrary) -> None:
    results = verdicts(library, "pair and not values=large")
    assert {result.status for result in results} == {"pass"}, [r.message for r in results if r.status == "fail"]
    words = " ".join(result.id for result in results)
    assert [x for x in ("mask=", "causal=", "window=", "heads=grouped", "batch=broadcast") if x not in words] == []
    assert library.description == "libmine.so: attention_float32, attention_float32_vjp"


CHANGES = {
    "another scale": ("w[j] *= c->scale;", "w[j] *= 1.01 * c->scale;", r"\[bound\] o: "),
    "the mask of another row": ("c->mask[(b * c->L + i)", "c->mask[(b * c->L + 0)", r"\[(bound|null_rows)\] "),
    "a gradient without its mean": ("(g[j] - mean)", "g[j] + 0 * mean", r"\[bound\] dq: "),
    "the last feature left out": ("m < e; m++) {\n                double", "m < e - 1; m++) {\n                double",
                                  r"\[nonfinite\] o: "),
    "one number too many": ("free(w);\n    return 0;", "free(w);\n    o[n * L * e] = 0;\n    return 0;",
                            r"attention_float32 wrote to byte \d+ of o, which has \d+"),
    "one number before": ("free(w);\n    return 0;", "free(w);\n    o[-1] = 0;\n    return 0;",
                          r"attention_float32 wrote to byte -\d+ of o, which has \d+"),
    "an input": ("free(w);\n    return 0;", "free(w);\n    ((float *)k)[0] += 1;\n    return 0;",
                 r"attention_float32 wrote to byte [0-3] of k, which has \d+"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_errors_in_c_are_told(change: str, tmp_path: Path) -> None:
    before, after, text = CHANGES[change]
    source = EXAMPLE.read_text()
    assert source.count(before) == 1
    wrong = SharedLibrary(compiled(tmp_path, source.replace(before, after)), "attention")
    messages = " ".join(result.message for result in verdicts(wrong, "pair.plain or pair and mask=2d"))
    assert re.search(text, messages), messages


def test_what_a_c_function_refuses_is_unsupported(tmp_path: Path) -> None:
    source = EXAMPLE.read_text().replace("if (!w) return 1;", "if (!w || mask) return 7;")
    results = verdicts(SharedLibrary(compiled(tmp_path, source), "attention"), "pair.plain or pair and mask=2d")
    assert {result.reason for result in results} == {"", "attention_float32 returned 7"}
    assert {result.status for result in results} == {"pass", "unsupported"}


def test_a_library_without_the_functions_is_refused(library: SharedLibrary, tmp_path: Path) -> None:
    with pytest.raises(IllFormed, match="cannot be loaded"):
        SharedLibrary(tmp_path / "libnothing.so", "attention")
    with pytest.raises(IllFormed, match="none of the functions nothing_float64, nothing_float32"):
        SharedLibrary(compiled(tmp_path, "int attention(void) { return 0; }"), "nothing")


def test_guards_see_a_write_anywhere_around() -> None:
    for place in (-64, -1, 12, 75):
        guarded = Guarded("o", np.zeros(3, np.float32))
        guarded.bytes[guarded.start + place] ^= 1
        with pytest.raises(RuntimeError, match=f"f wrote to byte {place} of o, which has 12"):
            guarded.check("f", changed=True)
    inside = Guarded("o", np.zeros(3, np.float32))
    inside.content[1] = 1
    inside.check("f", changed=True)
    with pytest.raises(RuntimeError, match="f wrote to byte"):
        inside.check("f", changed=False)
