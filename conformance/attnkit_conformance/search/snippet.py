"""A case as a readable program: it needs the peer's library and NumPy, and prints the actual and the defined result."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.adapters.bases.arguments import visible_pairs
from attnkit_conformance.core import layouts_held_by, typed_arrays
from attnkit_conformance.golden import golden
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.memory import memory_of
from attnkit_conformance.model.types import Foreign
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.base import Source

MASKS = ("mask", "key_lengths", "query_mask")
WITH_STRIDES = ("torch", "numpy")  # the others copy what they are given
WITH_GRADIENTS = ("torch", "jax", "mlx")


def shows_gradients(adapter: Foreign, case: Case) -> bool:
    """Whether a program of this case can show a gradient: those of keras compute on NumPy's arrays."""
    source: Source = adapter.source(case.op, typed_arrays(adapter, case), case.params)
    return source.library in WITH_GRADIENTS


def snippet(
    adapter: Foreign, case: Case, output: str, exception: str = "", of_dtype: bool = False
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The program (arrays, the peer's call, the defined value, both printed) and its environment.

    `output` is what differs: an output of the op, or d<argument> for a gradient. If the call raises `exception`, its
    text replaces the result; `of_dtype`, the names of dtypes replace both sides. Arrays lie in memory as they do in the
    case, as far as the library has such arrays.
    """
    case = layouts_held_by(adapter, case)
    arrays = typed_arrays(adapter, case)
    source: Source = adapter.source(case.op, arrays, case.params)
    truth = golden(case)
    gradient = output[1:] if output.startswith("d") else ""
    label = output or next(iter(truth.outputs))
    expected = (truth.gradients[gradient] if gradient else truth.outputs[label]).golden
    asked = [name for name in case.cotangents if name in source.others] if gradient else []
    called = (
        gradient_lines(source, gradient, asked) if gradient else [f"got = {source.others.get(output, source.result)}"]
    )
    call = [*source.lines, *called]
    if exception:
        call = ["try:", *(f"    {line}" for line in call), f"except {exception} as error:"]
        call.append(f'    got = f"{exception}: {{error}}"')
    call += ["got = str(got.dtype)"] if of_dtype else []
    name = source.version.split('"')[1] if '"' in source.version else source.version.partition(".")[0]
    told = "got" if of_dtype else "got if isinstance(got, str) else got.tolist()" if exception else "got.tolist()"
    dtype = BY_NAME[case.op].output_dtype(label, case.dtype)
    defined = (
        f'"{source.library}.{dtype}"' if of_dtype else f"np.array({numbers(expected)}){shape(np.asarray(expected))}"
    )
    body = [
        *(literal(n, case.typed(n), case.dtype_of(n), source.library, n == gradient) for n in array_names(case)),
        *pairs(case, source.library),
        *(cotangent(case, name, source.library) for name in (["o", *asked] if gradient else [])),
        "",
        *call,
        "",
        f"# attnkit_reference.{reference_call(case)}{f', gradient of {gradient}' if gradient else ''}",
        f"expected = {defined}",
        f'print("{name}", {source.version}, "gives", {told})',
        f'print("the definition gives", expected{"" if of_dtype else ".tolist()"})',
    ]
    head = []
    if source.environment:
        head = ["import os", "", *(f'os.environ["{n}"] = "{value}"' for n, value in source.environment), ""]
    imports = ["import numpy as np", *(["import torch"] if source.library == "torch" else [])]
    imports += ["import jax"] if source.library == "jax" else []
    text = "\n".join(body)
    special = [n for n in ("inf", "nan") if any(f"{mark}{n}" in text for mark in ("[", " ", "-"))]
    imports += [f"from math import {', '.join(special)}"] if special else []
    return "\n".join([*head, *imports, *source.imports, "", text]) + "\n", source.environment


def cotangent(case: Case, output: str, library: str) -> str:
    """The cotangent of an output, in its dtype."""
    dtype = BY_NAME[case.op].output_dtype(output, case.dtype)
    return literal(f"d{output}", case.typed_cotangent(output, dtype), dtype, library)


def gradient_lines(source: Source, name: str, others: list[str]) -> list[str]:
    """`got` becomes the gradient of one argument, of further outputs too."""
    if others and source.library == "torch":
        results = {"o": source.result, **{output: source.others[output] for output in others}}
        total = " + ".join(f"({result} * d{output}).sum()" for output, result in results.items())  # some without it
        return [f"got = torch.autograd.grad({total}, {name})[0]"]
    if source.library == "torch":
        return [f"o = {source.result}", f"got = torch.autograd.grad(o, {name}, do)[0]"]
    if source.library == "jax":
        return [f"got = jax.vjp(lambda {name}: {source.result}, {name})[1](do)[0]"]
    if source.library == "mlx":
        return [f"got = mx.vjp(lambda {name}: [{source.result}], [{name}], [do])[1][0]"]
    raise ValueError(f"snippet: {source.library} has no gradients; expected one of {', '.join(WITH_GRADIENTS)}")


def array_names(case: Case) -> list[str]:
    """The arrays of the call; masks are shown as visible pairs."""
    return [name for name in case.arrays if name not in (MASKS if "qk" not in case.arrays else ())]


def pairs(case: Case, library: str) -> list[str]:
    """The visible pairs, if not all are visible."""
    if "k" not in case.arrays:
        return []
    seen = visible_pairs(case.arrays, case.params)
    return [] if seen is None else [literal("seen", np.array(seen, order="C"), "bool", library)]


def literal(name: str, x: np.ndarray, dtype: str, library: str, leaf: bool = False) -> str:
    """`name = <array>` in the library's arrays."""
    dense = x.flags.c_contiguous and x.flags.aligned
    text = values(x, dtype, library) if dense or library not in WITH_STRIDES else in_memory(x, dtype, library)
    text += ".requires_grad_()" if leaf and library == "torch" else ""
    frozen = library == "numpy" and not x.flags.writeable
    return f"{name} = {text}" + (f"\n{name}.flags.writeable = False" if frozen else "")


def values(x: np.ndarray, dtype: str, library: str) -> str:
    """A dense array."""
    kind = "bool_" if dtype == "bool" else dtype
    if library == "torch":
        return f"torch.tensor({numbers(x)}{'' if x.dtype.kind == 'b' else f', dtype=torch.{dtype}'}){shape(x)}"
    if library == "jax":
        return f'jax.numpy.array({numbers(x)}, "{dtype}"){shape(x)}'
    if library == "mlx":
        return f"mx.array({numbers(x)}){shape(x)}{'' if x.dtype.kind == 'b' else f'.astype(mx.{dtype})'}"
    return f"np.array({numbers(x)}, np.{kind}){shape(x)}"


def in_memory(x: np.ndarray, dtype: str, library: str) -> str:
    """An array by the numbers from its first to its last in memory, and its strides; beside an aligned address it lies
    behind some bytes more.
    """
    memory = memory_of(x)
    behind, content = memory.offset % x.itemsize, values(memory.content.view(x.dtype), dtype, library)
    if library == "torch":
        if behind:
            content = f"np.append(np.zeros({behind}, np.uint8), {content}.view(torch.uint8))[{behind}:]"
            content = f"torch.from_numpy({content}).view(torch.{dtype})"
        strides = tuple(stride // x.itemsize for stride in x.strides)
        return f"{content}.as_strided({x.shape}, {strides}, {memory.start // x.itemsize})"
    if behind:
        content = f"np.append(np.zeros({behind}, np.uint8), {content}.view(np.uint8))"
    kind = "bool_" if dtype == "bool" else dtype
    return f"np.ndarray({x.shape}, np.{kind}, {content}, {behind + memory.start}, {x.strides})"


def shape(x: np.ndarray) -> str:
    """The shape of an array without entries, which lists cannot express."""
    return "" if x.size else f".reshape({x.shape})"


def numbers(x: np.ndarray) -> str:
    """Nested lists; floats in the shortest form that is exact in their dtype."""
    if x.dtype.kind in "biu":
        return str(x.tolist())
    if x.dtype == np.float32:
        return nested(x)
    return str(x.astype(np.float64).tolist())


def nested(x: np.ndarray) -> str:
    return str(x[()]) if x.ndim == 0 else f"[{', '.join(nested(part) for part in x)}]"


def reference_call(case: Case) -> str:
    """The same call of attnkit_reference."""
    options = [f"{name}={name}" for name in case.arrays if name not in BY_NAME[case.op].arguments and name not in MASKS]
    masked = "k" in case.arrays and visible_pairs(case.arrays, case.params) is not None
    options += ["mask=seen"] if masked else [f"{name}={name}" for name in MASKS if name in case.arrays]
    hidden = ("causal", "window", "key_lengths") if masked else ()
    options += [f"{name}={value!r}" for name, value in case.params.items() if name not in hidden]
    return f"{case.op}({', '.join((*BY_NAME[case.op].arguments, *options))})"
