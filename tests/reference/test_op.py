"""What is derived from rows: every function is exported, and says its own name, arguments and errors."""

import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference._core import Rows, attend, gradients
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of
from attnkit_reference.softmax import softmax_rows
from attnkit_reference.statistics import ROWS

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(reference.__path__, "attnkit_reference.")
    if not found.ispkg and "._" not in found.name
]
SUFFIXES = ("_weights", "_vjp", "_magnitudes")
OF_SUBMODULES = [f"attnkit_reference.{name}" for name in ("lowrank.landmarks", "analysis.vectors", "analysis.spectra")]
PUBLIC = [name for name in reference.__all__ if inspect.isfunction(getattr(reference, name))]
X = np.ones((2, 3))


def functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that a module defines, derived ones among them."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in found if f.__module__ == module.__name__ and not name.startswith("_")}


def rows_functions() -> dict[str, Callable[..., Any]]:
    every = {name: f for module in MODULES for name, f in functions(module).items()}
    return {name.removesuffix("_rows"): f for name, f in every.items() if name.endswith("_rows")}


def test_rows_are_found() -> None:
    assert {"softmax", "pointwise", "entmax", "rela", "linear", "performer"} <= {*rows_functions()}


@pytest.mark.parametrize("name", rows_functions())
def test_everything_that_follows_from_rows_is_exported(name: str) -> None:
    missing = [suffix for suffix in ("", *SUFFIXES) if f"{name}_attention{suffix}" not in reference.__all__]
    assert missing == [], f"{name}_rows: derive and export {[f'{name}_attention{suffix}' for suffix in missing]}"
    assert ROWS.get(f"{name}_attention") is rows_functions()[name], f"add {name}_rows to ROWS of statistics.py"


@pytest.mark.parametrize("module", [m for m in MODULES if m.__name__ not in OF_SUBMODULES], ids=lambda m: m.__name__)
def test_every_derived_function_is_exported(module: ModuleType) -> None:
    derived = [name for name in functions(module) if name.endswith(SUFFIXES)]
    assert [name for name in derived if name not in reference.__all__] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_can_be_found_read_and_pickled(name: str) -> None:
    function = getattr(reference, name)
    assert function.__name__ == function.__qualname__ == name
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.getdoc(function)
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    takes_those_of_an_op = name.startswith(("row_statistics", "attention_with_statistics"))
    assert (inspect.Parameter.VAR_KEYWORD in kinds) == takes_those_of_an_op


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.endswith(SUFFIXES)])
def test_what_is_derived_takes_the_arguments_of_the_forward_function(name: str) -> None:
    forward = inspect.signature(getattr(reference, re.sub("_(weights|vjp|magnitudes)$", "", name))).parameters
    own = inspect.signature(getattr(reference, name)).parameters
    new = [p for p in own if p not in forward]
    gone = [p for p in forward if p not in own]
    if name.endswith(("_weights", "_weights_magnitudes")):
        assert new == []
        return
    assert new != []
    assert [p for p in new if not p.startswith("d")] == []
    assert [p for p in gone if not p.startswith("return_")] == []
    assert {p: own[p].default for p in own if p in forward} == {p: forward[p].default for p in forward if p in own}


def twice_rows(op: str, q: Any, k: Any, v: Any | None = None, *, times: float = 2.0, **options: Any) -> Rows:
    rows = softmax_rows(op, q, k, v, **options)
    return Rows(rows.scores, times * rows.w, rows.live, lambda dw, size: rows.pull(times * dw, times * size))


@keywords_of(twice_rows)
def twice(q: np.ndarray, k: np.ndarray, v: np.ndarray, **params: Any) -> Any:
    return attend(twice_rows("twice", q, k, v, **params))


twice_weights = derived_weights(twice, twice_rows)
twice_vjp, twice_magnitudes = derived_gradients(
    twice, twice_rows, "Gradients.", "Sizes.\n\n    Of summands.\n    ", gradients
)


def test_an_op_of_three_lines(check_gradients: Any, covers: Any, same: Any) -> None:
    rng = np.random.default_rng(3)
    arrays = {name: rng.normal(size=shape) for name, shape in (("q", (2, 3)), ("k", (4, 3)), ("v", (4, 5)))}
    do = rng.normal(size=(2, 5))
    params = {"times": 3.0, "causal": True, "dropout": (0.3, 1)}
    found = twice_vjp(**arrays, do=do, **params)
    check_gradients(lambda **x: {"o": twice(**x, **params)}, arrays, ({"o": do}, found))
    sizes = twice_magnitudes(*arrays.values(), do, **params)
    assert [*sizes] == ["o", *found]
    for name, value in {**found, "o": twice(**arrays, **params)}.items():
        covers(sizes[name], value, name)
    same(twice_weights(arrays["q"], arrays["k"], causal=True).sum(axis=-1), [2.0, 2.0])
    assert inspect.getdoc(twice_magnitudes) == "Sizes.\n\nOf summands."
    assert "(..., L, S) of `twice`" in str(twice_weights.__doc__)


def test_arguments_of_a_derived_function() -> None:
    names = [*inspect.signature(twice_vjp).parameters]
    assert names[:6] == ["q", "k", "v", "do", "times", "mask"]
    assert [*inspect.signature(twice_weights).parameters] == [
        name for name in names if name not in ("v", "do", "dropout", "dropout_mask")
    ]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: twice_vjp(X, X, X), TypeError, "twice_vjp: missing a required argument: 'do'"),
        (lambda: twice_weights(X, X, X), TypeError, "twice_weights: too many positional arguments"),
        (lambda: twice_magnitudes(X, X, X, X, q=X), TypeError, "twice_magnitudes: multiple values for argument 'q'"),
        (lambda: twice_vjp(X, X, X, X, tims=1.0), ValueError, "twice_vjp: unexpected argument 'tims'; .*'times'"),
        (lambda: twice_weights(X, X, dropout=(0.1, 0)), ValueError, "twice_weights: unexpected argument 'dropout'"),
        (lambda: twice_vjp(X, X, X, None), TypeError, "twice_vjp: do; expected a NumPy array, got None"),
        (lambda: twice_vjp(X, X, X, X[:1]), ValueError, "twice_vjp: do has another shape than the output"),
    ],
)
def test_errors_name_the_derived_function(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_cotangents_may_be_named_and_outputs_asked_for_are_left_out() -> None:
    def prepare(op: str, x: np.ndarray) -> Any:
        return op, x

    def pull(call: Any, do: np.ndarray, *, dstate: Any = None, absolute: bool = False) -> Any:
        return {"call": call, "do": do, "dstate": dstate, "absolute": absolute}

    def forward(x: np.ndarray, *, return_state: bool = False) -> Any:
        raise AssertionError("not asked for")

    vjp, magnitudes = derived_gradients(forward, prepare, "g", "m", pull)
    assert str(inspect.signature(vjp)).count("state") == 1
    assert vjp(1, 2, dstate=3) == {"call": ("forward_vjp", 1), "do": 2, "dstate": 3, "absolute": False}
    assert magnitudes(x=1, do=2) == {"call": ("forward_magnitudes", 1), "do": 2, "dstate": None, "absolute": True}
