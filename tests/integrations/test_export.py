"""The generic bodies as programs of torch.export and as ONNX models; `python -m tests.integrations.exports` has all."""

import pytest
import torch

from attnkit_conformance import tolerance
from tests.integrations.exports import CASES, error_of_export, error_of_onnx, exported

BOUND = tolerance.BOUND["float32"] * tolerance.eps("float32")
BY_NAME = {f"{case.op}{'-causal' if case.options.get('causal') else ''}": case for case in CASES}

# torch: its exporter and ONNX's still use names that torch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("name", ["reluformer_attention", "sigmoid_attention", "sparsemax_attention"])
def test_programs_serve_sizes_that_they_have_not_seen(name):
    assert error_of_export(BY_NAME[name], exported(BY_NAME[name])) <= BOUND


def test_strict_export():
    case = BY_NAME["softmax_attention-causal"]
    assert error_of_export(case, exported(case, strict=True)) <= BOUND


def test_an_onnx_model_computes_the_op():
    case = BY_NAME["pointwise_attention"]
    assert error_of_onnx(case, exported(case)) <= BOUND


def test_sorting_has_no_onnx_form():
    """Sparsemax and entmax find thresholds in sorted scores: when torch converts them, `onnx=False` is out of date."""
    case = BY_NAME["sparsemax_attention"]
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"No ONNX function found for .*aten.sort"):
        error_of_onnx(case, exported(case))
