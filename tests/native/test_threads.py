"""Any number of threads gives the same bits."""

import numpy as np
import pytest

import attnkit
from attnkit.backends.native import linear, packed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("library")
EDGES = tuple(int(x) for x in np.cumsum([0, *(3, 40, 1, 600) * 5]))
MORE = {"performer_attention": (torch.tensor(attnkit.orthogonal_features(12, 64, 0)).float(),)}
PACKED = [f"{op}_packed" for op in packed.OPS]
SHAPES = {
    **dict.fromkeys(("softmax_attention", *linear.OPS), (1, 8, 300, 64)),
    **dict.fromkeys(PACKED, (EDGES[-1], 4, 64)),
}


@pytest.mark.parametrize("op", SHAPES)
def test_any_number_of_threads_gives_the_same_bits(op):
    q, k, v = (torch.randn(SHAPES[op]).requires_grad_() for _ in range(3))
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
