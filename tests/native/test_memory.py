"""Nothing beyond an array is read or written: a page that may not be touched lies behind each, or before it."""

import ctypes
import mmap
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

import attnkit
from attnkit.backends.numpy.native import address

pytestmark = pytest.mark.usefixtures("library")
PAGE = mmap.PAGESIZE
FORBIDDEN = 0  # PROT_NONE
OPS = ["softmax_attention", "pointwise_attention", "entmax_attention", "sparsemax_attention", "gaussian_attention"]
LINEAR_OPS = ["linear_attention", "cosine_attention", "performer_attention", "efficient_attention"]


def guarded(x: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy of x whose last element (first, if not `at_end`) is beside a page that may not be touched."""
    size = max(1, -(-x.nbytes // PAGE)) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (start, start + PAGE + size):
        assert protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), FORBIDDEN) == 0
    offset = PAGE + (size - x.nbytes if at_end else 0)
    copy = np.frombuffer(memory, x.dtype, x.size, offset).reshape(x.shape)
    copy[...] = x
    return copy


def linear_calls(op: str, dtype: str, at_end: bool, queries: int, keys: int, d: int, e: int) -> None:
    rng = np.random.default_rng(0)

    def tokens(*shape):
        return guarded(rng.random(size=shape).astype(dtype), at_end)

    arrays = [tokens(2, queries, d), tokens(2, keys, d), tokens(2, keys, e)]
    f = d + (op == "cosine_attention")
    if op == "performer_attention":
        arrays.append(tokens(11, d))
        f = 11
    state = [tokens(2, f, e), tokens(2, f)]
    if op in ("performer_attention", "efficient_attention"):
        state.append(tokens(*((2,) if op == "performer_attention" else (2, f))))
    do, options = (
        tokens(2, queries, e),
        {
            "mask": guarded(rng.random((1, keys)) < 0.9, at_end),
            "key_lengths": guarded(np.array([keys, keys - 1], np.int32), at_end),
            "query_mask": guarded(rng.random((2, queries)) < 0.9, at_end),
            "initial_state": tuple(state),
        },
    )
    for name in (None, *options):
        chosen = {} if name is None else {name: options[name]}
        for causal in (False, True):
            if causal and name == "initial_state" and queries != keys:
                continue
            getattr(attnkit, op)(*arrays, impl="native", causal=causal, return_state=True, **chosen)
            getattr(attnkit, f"{op}_vjp")(*arrays, do, impl="native", causal=causal, dstate=tuple(state), **chosen)


def calls(op: str, dtype: str, at_end: bool, queries: int, keys: int, d: int, e: int) -> None:
    rng = np.random.default_rng(0)

    def tokens(*shape):
        return guarded(rng.normal(size=shape).astype(dtype), at_end)

    q, k, v, do = tokens(2, queries, d), tokens(2, keys, d), tokens(2, keys, e), tokens(2, queries, e)
    options = {
        "mask": guarded(rng.random((queries, keys)) < 0.9, at_end),
        "bias": tokens(2, 1, keys),
        "key_lengths": guarded(np.array([keys, keys - 1], np.int32), at_end),
        "query_mask": guarded(rng.random((2, queries)) < 0.9, at_end),
        "dropout_mask": tokens(queries, keys),
    }
    for name in (None, *options):
        chosen = {} if name is None else {name: options[name]}
        for causal in (False, True):
            getattr(attnkit, op)(q, k, v, impl="native", causal=causal, **chosen)
            getattr(attnkit, f"{op}_vjp")(q, k, v, do, impl="native", causal=causal, **chosen)


def every_call() -> None:
    """Each is printed before it begins."""
    for op, dtype, at_end in product(OPS + LINEAR_OPS, ("float32", "float64", "float16"), (True, False)):
        function = linear_calls if op in LINEAR_OPS else calls
        for shape in SHAPES:
            print(op, dtype, "page behind" if at_end else "page before", shape, flush=True)
            function(op, dtype, at_end, *shape)


SHAPES = [
    (1, 1, 1, 1),
    (5, 7, 8, 6),
    (33, 70, 20, 17),
    (130, 67, 64, 65),
    (70, 70, 9, 3),
    (1, 300, 64, 64),
]  # queries, keys, d, e


@pytest.mark.skipif(sys.platform != "linux", reason="asks mprotect of the C library")
def test_pages_beside_an_array_are_not_touched():
    """In a process of its own, which a fault ends."""
    code = "from tests.native.test_memory import every_call\nevery_call()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"signal {-done.returncode} in {last}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("shape", [(3,), (2, 3), (), (0,), (0, 4)])
def test_the_address_of_an_array(shape):
    x = np.zeros((4, *shape), np.float16)[1, ...]
    for view in (x, x.T, x[..., None][::-1], np.broadcast_to(x, (2, *shape))):
        view.flags.writeable = False
        assert address(view) == view.ctypes.data


@pytest.mark.skipif(sys.platform != "linux", reason="asks mprotect of the C library")
def test_a_touched_page_ends_the_process():
    code = (
        "import ctypes, numpy as np\nfrom tests.native.test_memory import guarded\n"
        "x = guarded(np.zeros(3), True)\nctypes.string_at(x.ctypes.data, x.nbytes + 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == -11
