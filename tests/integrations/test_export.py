"""The generic bodies as programs of torch.export and as ONNX models; `python -m tests.integrations.exports` has all."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import attnkit
from attnkit.nn import MultiHeadAttention
from attnkit_conformance.model import tolerance
from tests.integrations.exports import CASES, Case, arrays, error_of_export, error_of_onnx, exported

BOUND = tolerance.BOUND["float32"] * tolerance.eps("float32")
BY_NAME = {f"{case.op}{'-causal' if case.options.get('causal') else ''}": case for case in CASES}

# torch: its exporter and ONNX's still use names that torch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize(
    "name", ["reluformer_attention", "sigmoid_attention", "sparsemax_attention", "linear_attention"]
)
def test_programs_serve_sizes_that_they_have_not_seen(name):
    assert error_of_export(BY_NAME[name], exported(BY_NAME[name])) <= BOUND


class Rows(nn.Module):
    """Statistics of weights whose threshold is found by halving a bracket that depends on the number of keys."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(attnkit.row_statistics("entmax_attention", q, k, alpha=1.25, impl="generic"))


def test_statistics_of_sizes_that_a_program_has_not_seen():
    free = {0: Dim("batch", min=2, max=64), 2: Dim("length", min=2, max=16)}
    seen, new = (arrays(Case("entmax_attention"), *sizes)[:2] for sizes in ((2, 6), (3, 9)))
    program = export(Rows(), seen, dynamic_shapes=(free, free), strict=False).module()
    for found, golden in zip(program(*new), Rows()(*new), strict=True):
        assert float((found - golden).abs().max() / golden.abs().max()) <= BOUND


def test_strict_export():
    case = BY_NAME["softmax_attention-causal"]
    assert error_of_export(case, exported(case, strict=True)) <= BOUND


@pytest.mark.parametrize("name", ["pointwise_attention", "sparsemax_attention"])
def test_an_onnx_model_computes_the_op(name):
    assert error_of_onnx(BY_NAME[name], exported(BY_NAME[name])) <= BOUND


def onnx(model: object, x: Tensor) -> np.ndarray:
    """What ONNX Runtime makes of x with a module, or a program of torch.export, exported to ONNX."""
    import onnxruntime

    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def test_a_model_that_is_already_built_becomes_an_onnx_model():
    """By itself, and as a program of torch.export, whose operations are chosen before, inside using."""
    torch.manual_seed(0)
    model, x = MultiHeadAttention(8, 2, op="relu").eval(), torch.randn(2, 5, 8)
    golden = model(x).detach().numpy()
    with attnkit.using(impl="generic"):
        program = export(model, (x,))
    for given in (model, program):
        assert float(np.abs(onnx(given, x) - golden).max() / np.abs(golden).max()) <= BOUND


@pytest.mark.skipif(attnkit.native_status().level is None, reason="the compiled kernels are not there")
def test_what_onnx_cannot_take_says_what_it_can():
    model, x = MultiHeadAttention(8, 2, op="relu", impl="native").eval(), torch.randn(2, 5, 8)
    for given in (model, export(model, (x,))):
        with pytest.raises(Exception, match=r"impl='generic'.* attnkit.using\(impl='generic'\)"):
            onnx(given, x)
