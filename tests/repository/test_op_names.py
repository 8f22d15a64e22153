"""An op is named by a string where `op_names` says, and nowhere else."""

from fnmatch import fnmatch

import pytest

from .op_names import ANY, INSTEAD, NAMES, OWN, ROOTS, everything, in_place, named_in

BODY = "attnkit/backends/torch/blocked.py"


def test_no_op_is_named_elsewhere():
    strangers = [str(one) for one, good in everything() if not good]
    assert not strangers, "\n".join(("", *strangers))


def test_every_place_is_needed():
    for pattern in (*OWN, *ANY):
        assert any(good and fnmatch(one.path, pattern) for one, good in everything()), pattern


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('ENOUGH = {"pointwise_attention": 1}', ["pointwise_attention"]),
        ('x = op == "linear_attention_step_vjp"', ["linear_attention_step_vjp"]),
        ('x = "softmax" + "_attention"', ["softmax_attention"]),
        ('x = f"softmax_{kind}"', ["softmax_{}"]),
        ('x = "entmax_" + kind', ["entmax_{}"]),
        ('x = "{}_sparsemax".format(kind)', ["{}_sparsemax"]),
        ('x = op.startswith(("sima", "x"))', ["sima"]),
        ('"""softmax_attention"""\n__all__ = ["softmax_attention"]', []),
        ('def f(): "softmax_attention"', []),
        ('x = f"{op}_vjp", f"{op}_attention", op.endswith("_attention"), activation == "sigmoid"', []),
        ('x = f"{op}: softmax_attention has no such option"', []),
    ],
)
def test_a_planted_name_is_found(source, names):
    assert [one.name for one in named_in(source, BODY)] == names
    assert not any(in_place(one, source) for one in named_in(source, BODY))


def test_a_record_and_a_row_name_their_own_ops_alone():
    record, row = "attnkit/ops/softmax.py", "conformance/attnkit_conformance/families/softmax.py"
    source = 'x = "softmax_attention", "pointwise_attention"\ndef softmax_attention(): ...'
    assert [in_place(one, source) for one in named_in(source, record)] == [True, False]
    assert [in_place(one, "") for one in named_in(source, row)] == [True, False]


def test_the_message_says_where_and_what_instead():
    (found,) = named_in('\nx = "softmax_attention"', BODY)
    assert str(found) == f'{BODY}:2: "softmax_attention" names an op by a string; use {INSTEAD["attnkit"]}'
    assert {*INSTEAD} == {*ROOTS}
    assert {"row_statistics", "newton_inverse_vjp", "landmarks.random", "analysis.sparsity"} <= NAMES
