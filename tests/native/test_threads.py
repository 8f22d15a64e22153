"""Any number of threads gives the same bits, and calls with tensors take the threads of torch's own operations."""

import subprocess
import sys

import numpy as np
import pytest

import attnkit
from attnkit.backends.native import linear, packed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("library")
EDGES = tuple(int(x) for x in np.cumsum([0, *(3, 40, 1, 600) * 5]))
MORE = {
    "performer_attention": (torch.tensor(attnkit.orthogonal_features(12, 64, 0)).float(),),
    "gated_linear_attention": (-torch.rand(1, 8, 300, 64),),
    "delta_attention": (torch.rand(1, 8, 300),),
}
SCALE = {"delta_attention": 0.1}  # keys of norm 1 at most, for a state that does not grow
PACKED = [f"{op}_packed" for op in packed.OPS]
SHAPES = {
    **dict.fromkeys(("softmax_attention", *linear.OPS), (1, 8, 300, 64)),
    **dict.fromkeys(PACKED, (EDGES[-1], 4, 64)),
}


@pytest.mark.parametrize("op", SHAPES)
def test_any_number_of_threads_gives_the_same_bits(op):
    q, k, v = (torch.randn(SHAPES[op]).mul_(SCALE.get(op, 1.0)).requires_grad_() for _ in range(3))
    more = (EDGES, EDGES) if op in PACKED else MORE.get(op, ())
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            o = getattr(attnkit, op)(q, k, v, *more, causal=True, impl="native")
            found.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


# ---------------------------------------------------------------------------------------------- torch's own threads

ALONE = """
import os, sys, torch, attnkit
torch.set_num_threads(2)
q = torch.randn(4, 400, 64)
q @ q.mT + 1
before = len(os.listdir("/proc/self/task"))
attnkit.pointwise_attention(q, q, q, impl="native")
print(len(os.listdir("/proc/self/task")) - before)
"""
FORKED = """
import os, signal, sys, torch, attnkit, numpy as np
torch.set_num_threads(2)
q = torch.randn(4, 400, 64)
q @ q.mT + 1  # the parent has a team
if sys.argv[1] == "before":
    attnkit.pointwise_attention(q, q, q, impl="native")
child = os.fork()
if child == 0:
    signal.alarm(60)
    o = attnkit.pointwise_attention(q, q, q, impl="native")
    os._exit(0 if np.isfinite(o.numpy()).all() else 1)  # operations of torch would wait
print(os.waitpid(child, 0)[1])
"""


def told(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.openmp.is_available(),
    reason="torch does not compute with OpenMP here",
)
def test_a_call_behind_an_operation_of_torch_starts_no_thread():
    assert told(ALONE) == "0"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(when):
    """It was forked before or after the first call, which asks where torch's threads are."""
    assert told(FORKED, when) == "0"
