"""The interface through which every implementation is judged, attnkit's own backends and third parties alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from attnkit_conformance.model.types import Arrays, Foreign, Params

DERIVATIVES = ("jvp", "hvp", "vmap_grad")
"""The optional methods for derivatives beyond gradients."""

LONGEST = 2000
"""Characters of a text of an adapter that reports hold."""


class Unsupported(Exception):
    """Raised by an adapter for a valid call that its implementation does not support; the text is the reason."""


@contextmanager
def refusing() -> Iterator[None]:
    """NotImplementedError, by which a function says what it does not support, becomes Unsupported."""
    try:
        yield
    except NotImplementedError as refusal:
        raise Unsupported(str(refusal)) from refusal


class IllFormed(ValueError):
    """Raised for an object that is not an adapter, or for malformed results: refused, not judged."""


class Adapter(Protocol):
    """The interface of an implementation. Missing attributes or wrong types raise `IllFormed`.

    `array` takes a NumPy array that already has the dtype `dtype` (bfloat16 as ml_dtypes.bfloat16) in any memory layout
    (`model.layout`: strides of 0 and below, off its alignment, read-only); `numpy` is its inverse and must refuse
    (TypeError) anything that is not an array of this library on this device. `call` returns {output name: array}. `vjp`
    takes a cotangent for every differentiable output and returns {argument name: gradient}. Both may raise
    `Unsupported(reason)`, and anything else that they raise is a failure of the case.

    Ten attributes are optional. `ops` (names) restricts what is asked of the adapter at all. `serves` ({op: {factor:
    levels}}, levels of the grammar of an op beside those of a plain call) says which calls it answers: all of its cases
    lie inside, a refusal there is a failure, and calls beside it must be refused. `copied` (names of layouts) says of
    which layouts its library has no arrays: it is given dense ones. `compiles = True`: every case is a program to
    compile first, so that the full profile judges all pairs of options, and no triples, and few long and wide calls.
    `emulates = True`: so few for one that emulates a GPU.
    `unsupported(op, arrays, params) -> reason or None` declares beforehand what will be refused: then exactly those
    calls must raise Unsupported. `without` (names of parameters, e.g. "return_lse") says which further outputs the
    implementation does not have: its cases are asked without them, and all else is judged. `declines` (names of
    policies, `model.policies`, and of properties) says what it does not promise: that is not asked, and any failure in
    the rest decides the exit status; without the attribute failures of policies and in tails do not. `errors = True`
    holds the adapter to the error texts of semantics A12. `surroundings = "also"` has it judged in the surroundings of
    NumPy, torch or JAX too, where gradients are those of `call` by torch or JAX; "alone", in nothing else.
    `description` (text) is shown in reports beside the name.

    `run MODULE:ADAPTER` loads an adapter in a process of its own, which gets inputs and sends results; these attributes
    are read once. `--here` loads it beside the judge.

    Optional is `with_threads(number)`, a context in which calls may use that many threads: a search draws their number.

    So are three methods, for derivatives beyond gradients, on which an adapter that has them is judged in float64:

    - `jvp(op, arrays, params, tangents)` returns {output name: tangent} for every output that has a gradient;
    - `hvp(op, arrays, params, cotangents, tangents)` the derivatives along the tangents of what `vjp` returns;
    - `vmap_grad(op, arrays, params, cotangents, samples)` what `vjp` returns for each sample, on a new first axis.

    `tangents` and `samples` hold an array for each argument that has a gradient, samples with that axis; they share
    the cotangents and all other arrays. In `serves[op]` the key "derivatives" names the methods that answer.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    def array(self, x: np.ndarray, dtype: str) -> Foreign:
        """Convert a NumPy array."""
        ...

    def numpy(self, x: Foreign) -> np.ndarray:
        """Convert to NumPy, with the same dtype."""
        ...

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """Outputs by name."""
        ...

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        """Gradients by argument name."""
        ...


def as_numpy(adapter: Adapter, name: str, x: Foreign) -> np.ndarray:
    """x converted by the adapter; IllFormed if the result is not a NumPy array."""
    array = adapter.numpy(x)
    if not isinstance(array, np.ndarray | np.generic):
        got = f"{kind(array)} for {name}, {kind(x)} as the adapter has it"
        raise IllFormed(f"adapter {adapter.name!r}: numpy must return a NumPy array; got {got}")
    return np.asarray(array)


def arrays_of(adapter: Adapter, method: str, answer: object) -> dict[str, np.ndarray]:
    """What `call` or `vjp` returned, as NumPy arrays; IllFormed if it is not a dict of arrays by name."""
    if not isinstance(answer, Mapping) or not all(isinstance(name, str) for name in answer):
        got = f"the keys {list(answer)}" if isinstance(answer, Mapping) else kind(answer)
        raise IllFormed(f"adapter {adapter.name!r}: {method} must return a dict of arrays by name; got {got}")
    return {name: as_numpy(adapter, name, x) for name, x in answer.items()}


def package_of(adapter: Adapter) -> str:
    """The package that an adapter's arrays are of."""
    return type(adapter.array(np.zeros(1, adapter.dtypes[0]), adapter.dtypes[0])).__module__.partition(".")[0]


def kind(x: object) -> str:
    """None, or the name of the type of x."""
    return "None" if x is None else type(x).__name__


def cut(text: str, most: int = LONGEST) -> str:
    """A text of somebody else, of which a report holds the beginning and says how much is left out."""
    left = len(text) - most
    return text if left <= 0 else f"{text[:most]} ... ({left:,} characters left out)"
