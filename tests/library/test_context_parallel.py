"""Attention over 2, 3 and 4 gloo processes is that of one process: values, gradients, and the bytes that are sent."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import ProcessRaisedException, get_context, spawn, start_processes

import attnkit
from attnkit.nn import GatedAttentionUnit, MultiHeadAttention, capture, context_parallel, count_traffic, parallelize
from attnkit.nn.context_parallel import SERVED, softmax
from attnkit.nn.context_parallel.shards import Shards, Visibility, between, visible_counts
from tests.library.arrays import LAYER, assert_close, qkv
from tests.library.context_parallel_cases import (
    LENGTHS,
    MEMBERS,
    PLANTS,
    PROCESSES,
    TOKENS,
    Case,
    fail,
    model,
    through,
    wholly,
    work,
)
from tests.shared import made_once

DRAWN = np.random.default_rng(9)
KEYS = {"mask": DRAWN.random((2, 1, 1, TOKENS)) < 0.7, "query_mask": DRAWN.random((2, 1, TOKENS)) < 0.7}
PADDED = {"key_lengths": np.array([[11], [0]]), "causal": True}
OWN: dict[str, dict[str, Any]] = {
    "pointwise_attention": {"activation": "gelu", "alpha": 0.5, "gain": 2.0, "shift": "-log_length"},
    "performer_attention": {"projection": attnkit.orthogonal_features(5, 8, 0)},
    "linear_attention": {"scale": 0.5},
}
OPS = [op.__name__ for op in SERVED]
POINTWISE = ("pointwise_attention", "reluformer_attention", "sigmoid_attention", "gaussian_attention")
WINDOWED = ("softmax_attention", *POINTWISE)


def _cases() -> list[Case]:
    found = []
    for op in OPS:
        case = partial(Case, op=op)
        own = OWN.get(op, {})
        found += [
            case(f"{op}-plain", options=own),
            case(f"{op}-plain-single", options=own, dtype="float32", tell_lengths=True),
            case(f"{op}-half", options=own, dtype="float16"),
            case(f"{op}-causal", options={**own, "causal": True}, lengths=LENGTHS[4]),
            case(f"{op}-causal-single", options={**own, "causal": True}, lengths=LENGTHS[3], dtype="float32"),
            case(f"{op}-masked", options={**own, **KEYS}, lengths=LENGTHS[3]),
            case(f"{op}-masked-causal", options={**own, **KEYS, "causal": True}, lengths=LENGTHS[4]),
            case(f"{op}-padded", options={**own, **PADDED}, lengths=LENGTHS[3]),
            case(f"{op}-shared-heads", options={**own, "enable_gqa": True}, shape=(2, 4, 2, 8, 6)),
        ]
    for op in WINDOWED:
        window, shared = {"window": (4, 2), **KEYS}, {"enable_gqa": True, "causal": True}
        found += [
            Case(f"{op}-window", op, window, LENGTHS[4]),
            Case(f"{op}-causal-window", op, {"window": (3, None), "causal": True}, LENGTHS[3]),
            Case(f"{op}-shared-heads-causal", op, shared, LENGTHS[4], "float64", (1, 4, 2, 8, 6)),
        ]
    found += [
        Case("relu-squared", "pointwise_attention", {"activation": "relu_squared", **KEYS}, LENGTHS[3]),
        Case("all", "pointwise_attention", {"length": "all", **KEYS}, LENGTHS[4]),
        Case("key-lengths", "softmax_attention", {"key_lengths": 9, "causal": "upper_left"}, LENGTHS[4]),
        Case("key-lengths-window", "sigmoid_attention", {"key_lengths": 9, "window": (None, 3)}, LENGTHS[4]),
        Case("number", "pointwise_attention", {"length": 3.5, "causal": True}, LENGTHS[4]),
        Case("performer-relu", "performer_attention", {**OWN["performer_attention"], "kernel": "relu", "causal": True}),
        Case("linear-identity", "linear_attention", {"feature_map": "identity", **KEYS}, LENGTHS[4]),
    ]
    return found


CASES = _cases()
CAUSAL = {"causal": True}
PLANTED = [
    Case("local-length", "pointwise_attention", {}, LENGTHS[3], plant="local-length"),
    Case("no-causal-offset", "softmax_attention", CAUSAL, LENGTHS[4], plant="no-causal-offset"),
    Case("no-causal-offset-of-queries", "pointwise_attention", CAUSAL, LENGTHS[4], plant="no-causal-offset-of-queries"),
    Case("first-state-only", "linear_attention", CAUSAL, LENGTHS[4], plant="first-state-only"),
    Case("lse-ignored", "softmax_attention", {}, LENGTHS[2], plant="lse-ignored"),
]
COUNTED_OPS = ("pointwise_attention", "linear_attention", "efficient_attention", "softmax_attention")
COUNTED = [
    Case(f"{op}-{count}", op, lengths=(32,) * count, dtype="float32", shape=(1, 4, 4, 16, 16), tell_lengths=True)
    for op in COUNTED_OPS
    for count in (2, 4)
]
MODELS = ["pointwise_attention", "softmax_attention", "linear_attention"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of the processes has found; their first error is raised here."""

    def make(folder: Path) -> None:
        get_context("forkserver").set_forkserver_preload([work.__module__])  # torch is imported once, not by each
        start_processes(work, (folder, [*CASES, *PLANTED, *COUNTED], MODELS), PROCESSES, start_method="forkserver")

    folder = made_once(tmp_path_factory, "context_parallel", make)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def parts_of(found: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    return [found[rank][case.name] for rank in MEMBERS[len(case.lengths)]]


def check(found: list[dict[str, Any]], case: Case) -> None:
    want = wholly(case)
    parts = parts_of(found, case)
    for name, golden in want.items():
        got = torch.cat([part[name] for part in parts], dim=-2)
        assert_close(got, golden.to(got.dtype))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_several_processes_are_one(found, case):
    check(found, case)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_a_planted_bug_is_found(found, case):
    with pytest.raises(AssertionError):
        check(found, case)


def test_every_bug_is_planted():
    assert {case.plant for case in PLANTED} == set(PLANTS)


@pytest.mark.parametrize("op", MODELS)
def test_a_model_over_processes_is_the_model(found, op):
    """Two blocks with shared heads, qk-norm and padding; gradients of weights are added up over the processes."""
    blocks, arrays = model(op)
    want = through(blocks, arrays["x"], arrays["present"], arrays["do"])
    assert len(want) == 1 + len(list(blocks.parameters()))
    parts = [processes[op] for processes in found]
    assert_close(torch.cat([part["out"] for part in parts], dim=1), want.pop("out"))
    for name, grad in want.items():
        for part in parts:
            assert_close(part[name], grad)


# ---------------------------------------------------------------------------------------------- traffic


def promised(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """The formulas of attnkit/nn/context_parallel, forward and backward; n tokens on each process."""
    count, n, size = len(case.lengths), case.lengths[0], 4 if case.dtype == "float32" else 8
    batch, heads, shared, d, e = case.shape
    rest = count - 1
    if case.op == "softmax_attention":
        ring = rest * batch * shared * n * (d + e) * size
        home = count * batch * shared * n * (d + e) * size
        return {"bytes": ring, "send": rest}, {"bytes": ring + home, "send": 2 * count - 1}
    if case.op in POINTWISE:
        both = rest * batch * heads * n * (d + e) * size
        calls = {"all_gather": 1, "reduce_scatter": 1}
        return {"bytes": both, **calls}, {"bytes": both, **calls}
    levels = d if case.op == "efficient_attention" else 0
    state = rest * batch * shared * (d * (e + 1) + levels) * size
    return {"bytes": state, "all_gather": 1}, {"bytes": state, "reduce_scatter": 1}


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_what_is_sent_is_what_the_formulas_say(found, case):
    for part in parts_of(found, case):
        assert (part["forward"], part["backward"]) == promised(case)


def sent(found, name: str) -> list[dict[str, int]]:
    case = next(case for case in CASES if case.name == name)
    return [part["forward"] for part in parts_of(found, case)]


def test_uneven_parts_masks_and_lengths_are_counted(found):
    """Of 13 tokens on (6, 0, 7): gathers are padded to 7; a ring sends what it holds; lengths take 8 bytes each."""
    lengths, mask, both = 2 * 8, 2 * 2 * 7, 2 * 2 * 4 * 7 * (8 + 6) * 8
    calls = {"all_gather": 3, "reduce_scatter": 1}
    assert sent(found, "pointwise_attention-masked") == 3 * [{"bytes": lengths + mask + both, **calls}]
    per_token = 2 * 4 * (8 + 6) * 8
    ring = [lengths + mask + tokens * per_token for tokens in (13 - 0, 13 - 7, 13 - 6)]
    assert sent(found, "softmax_attention-masked") == [{"bytes": n, "all_gather": 2, "send": 2} for n in ring]
    state = 2 * 2 * 4 * 8 * (6 + 1) * 8
    assert sent(found, "linear_attention-masked") == 3 * [{"bytes": lengths + state, "all_gather": 2}]


def test_the_table_of_the_page_is_what_is_sent(found):
    page = (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text()
    pattern = r"^\| `(\w+)` \| (\d+) \| ([\d,]+) \| ([^|]+) \| ([\d,]+) \| ([^|]+) \|$"
    rows = {(op, int(count)): rest for op, count, *rest in re.findall(pattern, page, flags=re.MULTILINE)}
    want = {}
    for case in COUNTED:
        part = parts_of(found, case)[0]
        row = []
        for direction in ("forward", "backward"):
            calls = dict(part[direction])
            row += [f"{calls.pop('bytes'):,}", ", ".join(f"{n} {kind}" for kind, n in sorted(calls.items()))]
        want[case.op, len(case.lengths)] = row
    assert rows == want


# ---------------------------------------------------------------------------------------------- one process


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def tensors() -> list[torch.Tensor]:
    return [torch.from_numpy(x).requires_grad_() for x in qkv(7, 7)]


@pytest.mark.parametrize("op", ["softmax_attention", "pointwise_attention", "linear_attention"])
def test_one_process_sends_nothing(alone, op):
    function = getattr(attnkit, op)
    with count_traffic() as traffic:
        o = context_parallel(function, *tensors(), mesh=alone, causal=True)
        o.sum().backward()
    assert_close(o, function(*tensors(), causal=True))
    assert traffic.bytes_sent == 0


def test_what_is_not_served_may_be_said_to_be_absent(alone):
    o = context_parallel(attnkit.linear_attention, *tensors(), mesh=alone, return_state=False, initial_state=None)
    assert_close(o, attnkit.linear_attention(*tensors()))


def test_a_key_mask_may_have_an_axis_of_queries_where_nothing_has_others(alone):
    q, k, v = (x[0, 0].detach() for x in tensors())
    mask = torch.arange(7)[None] < 4
    o = context_parallel(attnkit.softmax_attention, q, k, v, mesh=alone, mask=mask)
    assert_close(o, attnkit.softmax_attention(q, k, v, mask=mask))


def test_all_keys_may_be_one(alone):
    q, k, v = (x[..., :1, :].detach() for x in tensors())
    o = context_parallel(attnkit.pointwise_attention, q, k, v, mesh=alone, length="all")
    assert_close(o, attnkit.pointwise_attention(q, k, v, length="all"))


def test_keys_are_counted_beyond_the_integers_of_float32():
    tokens = 2**24 + 1
    causal = Visibility(True, None, None, None)
    n = visible_counts(None, Shards(None, 0, (tokens,)), causal, torch.empty(0, dtype=torch.float64))
    assert n[-1] == tokens


def test_blocks_that_no_query_sees_are_left_out():
    shards = Shards(None, 1, (3, 4, 5))

    def seen(**visible: Any) -> list[int]:
        visibility = Visibility(**{"causal": False, "window": None, "mask": None, "key_lengths": None} | visible)
        options = (softmax._block_options(n, shards, visibility, None, {}, torch.device("cpu")) for n in range(3))
        return [n for n, of_block in enumerate(options) if of_block is not None]

    assert seen() == seen(window=(1, 1)) == [0, 1, 2]
    assert seen(causal=True) == seen(window=(1, 0)) == [0, 1]
    assert seen(window=(0, 1)) == [1, 2]


@pytest.mark.parametrize("op", ["softmax_attention", "pointwise_attention", "linear_attention"])
def test_second_derivatives_raise(alone, op):
    q, k, v = tensors()
    o = context_parallel(getattr(attnkit, op), q, k, v, mesh=None)
    (dk,) = torch.autograd.grad((o * o).sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dk.sum().backward()


def test_counters_may_be_nested(alone):
    with count_traffic() as outer:
        context_parallel(attnkit.pointwise_attention, *tensors(), mesh=alone)
        with count_traffic() as inner:
            context_parallel(attnkit.pointwise_attention, *tensors(), mesh=alone)
    assert inner.calls == {"all_gather": 2, "reduce_scatter": 1}
    assert outer.calls == {"all_gather": 4, "reduce_scatter": 2}


PAIRS = torch.ones(7, 7, dtype=torch.bool)
REFUSED = [
    (attnkit.sparsemax_attention, {}, NotImplementedError, "sparsemax_attention is not served; served are softmax_"),
    (attnkit.softmax_attention, {"bias": torch.zeros(7)}, NotImplementedError, "softmax_attention with bias"),
    (attnkit.softmax_attention, {"dropout": (0.1, 1)}, NotImplementedError, "softmax_attention with dropout"),
    (attnkit.softmax_attention, {"sink": 0.0}, NotImplementedError, "softmax_attention with sink"),
    (attnkit.linear_attention, {"return_state": True}, NotImplementedError, "linear_attention with return_state"),
    (attnkit.softmax_attention, {"mask": PAIRS}, NotImplementedError, r"pairs is not served; got shape \(7, 7\)"),
    (attnkit.softmax_attention, {"mask": PAIRS[0].double()}, TypeError, "mask has dtype torch.float64"),
    (attnkit.softmax_attention, {"mask": PAIRS[0, :3]}, ValueError, r"mask marks \(3,\) tokens; expected \(..., 7\)"),
    (attnkit.softmax_attention, {"query_mask": PAIRS[0, :3]}, ValueError, r"query_mask marks \(3,\) tokens"),
    (attnkit.softmax_attention, {"causal": "lower"}, ValueError, "softmax_attention: causal must be False, True"),
    (attnkit.pointwise_attention, {"window": (-1, 2)}, ValueError, "pointwise_attention: window must be"),
    (attnkit.softmax_attention, {"key_lengths": torch.ones(5, dtype=torch.int64)}, ValueError, "key_lengths has shape"),
    (attnkit.pointwise_attention, {"length": torch.ones(7)}, NotImplementedError, "length is .*a number or a name"),
    (attnkit.softmax_attention, {"scale": torch.ones(())}, NotImplementedError, "scale is .*; pass a number$"),
    (attnkit.pointwise_attention, {"lengths": (6,)}, ValueError, "gives process 0 6 tokens; its q, k and v have 7"),
    (attnkit.pointwise_attention, {"lengths": (3, 4)}, ValueError, r"lengths must be 1 numbers.*got \(3, 4\)"),
    (attnkit.linear_attention, {"window": (1, 1)}, ValueError, "linear_attention: unexpected argument 'window'"),
    (attnkit.softmax_attention, {"alpha": 1.0}, ValueError, "softmax_attention: unexpected argument 'alpha'"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "options", "error", "text"), REFUSED)
def test_what_is_not_served_is_said(alone, op, options, error, text):
    with pytest.raises(error, match=text):
        context_parallel(op, *tensors(), mesh=alone, **options)


def test_a_mesh_of_two_dimensions_and_a_group_of_others_are_refused(alone):
    with pytest.raises(ValueError, match=r"mesh must have one dimension; got 2: pass mesh\['name'\]"):
        context_parallel(attnkit.softmax_attention, *tensors(), mesh=init_device_mesh("cpu", (1, 1)))
    with pytest.raises(ValueError, match="this process does not belong to mesh"):
        context_parallel(attnkit.softmax_attention, *tensors(), mesh=dist.GroupMember.NON_GROUP_MEMBER)


def test_queries_of_other_tokens_are_refused():
    q, k, v = (torch.from_numpy(x) for x in qkv(5, 7))
    with pytest.raises(ValueError, match="must be of the same tokens; got 5, 7, 7"):
        context_parallel(attnkit.softmax_attention, q, k, v, mesh=None)


def test_a_module_refuses_what_it_would_answer_from_its_own_tokens(alone):
    layer = MultiHeadAttention(8, 2)
    x = torch.randn(1, 5, 8)
    want = layer(x)
    parallelize(layer, alone)
    assert_close(layer(x), want, LAYER)
    for name, value in {"context": x, "return_weights": True, "return_statistics": True, "bias": x}.items():
        with pytest.raises(NotImplementedError, match=f"several processes: {name} is not served"):
            layer(x, **{name: value})
    with pytest.raises(NotImplementedError, match="context is not served"):
        layer(x, x)
    with capture(layer), pytest.raises(NotImplementedError, match="capture"):
        layer(x)


def test_modules_that_are_not_served_are_refused():
    with pytest.raises(ValueError, match="no MultiHeadAttention in Linear"):
        parallelize(torch.nn.Linear(2, 2), None)
    with pytest.raises(NotImplementedError, match="GatedAttentionUnit"):
        parallelize(torch.nn.ModuleList([MultiHeadAttention(8, 2), GatedAttentionUnit(8)]), None)
    with pytest.raises(NotImplementedError, match="entmax_attention is not served"):
        parallelize(MultiHeadAttention(8, 2, op="entmax_attention"), None)
    with pytest.raises(ValueError, match=r"dropout of weights must be 0; got 0\.5"):
        parallelize(MultiHeadAttention(8, 2, dropout=0.5), None)


def test_the_error_of_a_process_is_raised_here(tmp_path):
    with pytest.raises(ProcessRaisedException, match="this process has had enough"):
        spawn(fail, (tmp_path,), nprocs=2)


@pytest.mark.parametrize("window", [None, (1, None), (0, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [range(4), range(2, 6), range(3, 5), range(5, 9)])
def test_some_queries_and_keys_see_what_they_see_in_the_whole(keys: range, causal: bool, window: Any) -> None:
    queries, valid = range(3, 7), torch.tensor([True, False, *[True] * (len(keys) - 2)])
    options = between(queries, keys, valid, Visibility(causal, window, None, None), torch.device("cpu"))
    i, j = torch.arange(10)[:, None], torch.arange(10)
    left, right = window or (None, None)
    seen = torch.ones(10, 10, dtype=torch.bool)
    seen &= True if left is None else j >= i - left
    seen &= j <= i if causal else True if right is None else j <= i + right
    part = seen[queries.start : queries.stop, keys.start : keys.stop] & valid
    own = torch.arange(len(queries))[:, None] >= torch.arange(len(keys)) if "causal" in options else torch.tensor(True)
    assert torch.equal((options["mask"] & own).expand_as(part), part)
    assert ("causal" in options) == (causal and window is None and keys.start == queries.start)
