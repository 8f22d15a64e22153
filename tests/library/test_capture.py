"""capture: the model computes what it computes without, what is seen is right, and nothing stays behind."""

import asyncio
import contextlib
import inspect
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnkit
import attnkit_reference as reference
from attnkit._core.family import RECORDS
from attnkit.nn import MultiHeadAttention, StateCache, capture
from attnkit.nn.attention import _served
from attnkit.nn.gates import DECAYS, is_causal_alone

from .arrays import LAYER, assert_agrees, assert_close

RESIDUALS = {"blocks.*.attention": "blocks.*.norm", "blocks.*.mlp": "blocks.*.mlp_norm"}
OPS = {
    "softmax_attention": {},
    "pointwise_attention": {"alpha": 0.5},
    "reluformer_attention": {},
    "sigmoid_attention": {},
    "entmax_attention": {"alpha": 1.5},
    "gaussian_attention": {},
}


class Block(nn.Module):
    def __init__(self, dim: int, **attention) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = MultiHeadAttention(dim, 2, **attention)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, **masks) -> Tensor:
        x = x + self.attention(self.norm(x), **masks)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, dim: int = 8, depth: int = 2, **attention) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, **attention) for _ in range(depth))

    def forward(self, x: Tensor, **masks) -> Tensor:
        for block in self.blocks:
            x = block(x, **masks)
        return x


class Memory(nn.Module):
    """relu(x keysᵀ) values."""

    def __init__(self, dim: int, slots: int) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(slots, dim)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.keys.T) @ self.values


def tokens(batch: int = 3, length: int = 10, dim: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, dim, dtype=dtype)


def hooks(model: nn.Module) -> int:
    found = 0
    for module in model.modules():
        found += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(getattr(module, "observers", ()))
    return found


LEARNED = ("scale", "gain", "shift", "gamma", "slope", "intercept", "sink")
OPERANDS = {
    "linformer_attention": {"num_slots": 3, "max_length": 10},
    "nystrom_attention": {"num_landmarks": 3},
    "entmax_attention": {"alpha": 1.5},
}


def layers_of_every_op() -> dict[str, dict[str, Any]]:
    """A layer of every op that MultiHeadAttention takes, one for each kind of decay and one for each option of numbers,
    fixed and learned.
    """
    layers: dict[str, dict[str, Any]] = {}
    for op in (name for name in attnkit.__all__ if name.endswith("_attention") and _served(name)):
        function, needed = getattr(attnkit, op), OPERANDS.get(op, {})
        taken = inspect.signature(function).parameters
        plain = {"op": op, "options": needed, "causal": "causal" in taken or is_causal_alone(function)}
        layers[op] = plain
        layers |= {f"{op}, decay of {kind}": {**plain, "decay": kind} for kind in DECAYS.get(function, ())}
        numbers: dict[str, Any] = {name: 0.5 for name in LEARNED if name in taken}
        if op in RECORDS and not RECORDS[op].family.stateful:
            numbers |= {f"learned {name}": nn.Parameter(torch.full((2,), x)) for name, x in numbers.items()}
        if function is attnkit.linear_attention:
            numbers |= {"log_decay": -0.5, "learned log_decay": nn.Parameter(torch.tensor([-0.5, -0.1]))}
        for name, x in numbers.items():
            layers[f"{op}, {name}"] = {**plain, "options": {**needed, name.removeprefix("learned "): x}}
    return layers


EVERY = layers_of_every_op()

# ------------------------------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("name", EVERY)
def test_every_layer_runs_and_says_what_is_left_out(name: str) -> None:
    """Rows are those of the op's own weights; where there are none, in the whole or in a step, there is a reason."""
    layer, x = MultiHeadAttention(8, 2, **EVERY[name]).double(), tokens()
    there = torch.arange(10) < torch.tensor([10, 7, 4])[:, None]
    masks = {"key_mask": there, "query_mask": there}
    with torch.no_grad():
        plain = layer(x, **masks)
        with capture(layer) as record:
            watched = layer(x, **masks)
    assert torch.equal(plain, watched)
    seen = record[""]
    if layer.op.__name__ not in RECORDS:
        assert seen.left_out == {"rows": f"{layer.op.__name__} has no row statistics"}
        return
    with torch.no_grad():
        weights = layer(x, **masks, return_weights=True)[1]
    valid = seen.rows - seen.null - seen.dead
    assert valid
    assert_agrees(seen.means["sum_squares"], float(weights.square().sum()) / valid)
    assert "rows" not in seen.left_out


@pytest.mark.parametrize("name", [name for name in EVERY if EVERY[name]["causal"]])
def test_every_layer_decodes_and_says_what_is_left_out(name: str) -> None:
    """The weights of a step from a state are not those of its token alone."""
    layer, x = MultiHeadAttention(8, 2, **EVERY[name]).double(), tokens()
    with torch.no_grad():
        plain, watched = layer.new_cache(3, 10), layer.new_cache(3, 10)
        steps = [layer(part, cache=plain) for part in x.split(5, dim=1)]
        with capture(layer) as record:
            assert all(map(torch.equal, steps, [layer(part, cache=watched) for part in x.split(5, dim=1)]))
    seen = record[""]
    has_rows = layer.op.__name__ in RECORDS
    has_state = isinstance(plain, StateCache)
    assert ("rows" in seen.left_out) == (has_state or not has_rows)
    assert seen.rows == 3 * 2 * (0 if not has_rows else 5 if has_state else 10)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_outputs_and_gradients_are_the_same_bits(op, mode):
    """In training mode with dropout, whose seeds come from torch's generator."""
    model = Model(op=op, options=OPS[op], dropout=0.3, qk_norm=True, causal=True, num_kv_heads=1)
    model.train(mode == "training")
    x = tokens(dtype=torch.float32)

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        if mode == "inference":
            with torch.no_grad():
                return [model(x)]
        out = model(x)
        out.square().sum().backward()
        return [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.get_rng_state()]

    plain = run()
    with capture(model, residuals=RESIDUALS) as record:
        watched = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [layer.calls for layer in record.layers] == [1] * 4
    assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))


def test_hooks_are_gone_afterwards_and_after_an_exception():
    model, x = Model().double(), tokens()
    with capture(model, residuals=RESIDUALS):
        assert hooks(model) == 2 * 5
        model(x)
    assert hooks(model) == 0
    with contextlib.suppress(ZeroDivisionError), capture(model, residuals=RESIDUALS) as record:
        model(x)
        raise ZeroDivisionError
    assert hooks(model) == 0
    assert record["blocks.0.attention"].calls == 1
    with pytest.raises(RuntimeError, match=r"shape|size"), capture(model):
        model(tokens(dim=7))
    assert hooks(model) == 0


def test_two_captures_at_once():
    model, x = Model().double(), tokens()
    with capture(model) as outer:
        model(x)
        with capture(model) as inner:
            model(x)
    assert (outer["blocks.0.attention"].calls, inner["blocks.0.attention"].calls) == (2, 1)


def test_autocast():
    model = Model()
    x = tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with capture(model, residuals=RESIDUALS) as record:
            assert torch.equal(model(x), plain)
    assert all(math.isfinite(layer.variance_ratio) for layer in record.layers)


# ------------------------------------------------------------------------------------- what is seen


@pytest.mark.parametrize("op", OPS)
def test_rows_are_those_of_the_reference(op):
    """Two batches of different lengths: means over the valid rows of both."""
    model = Model(op=op, options=OPS[op], causal=True).double().eval()
    batches = [tokens(2, 9), tokens(3, 6)]
    with torch.no_grad(), capture(model) as record:
        for x in batches:
            model(x)
    attention, norm = model.blocks[0].attention, model.blocks[0].norm
    sums, curves, rows = {}, [], 0
    for x in batches:
        with torch.no_grad():
            q, k = (
                attention._heads(projection(norm(x)), 2).numpy() for projection in (attention.q_proj, attention.k_proj)
            )
        found = reference.row_statistics(op, q, k, causal=True, **OPS[op])
        valid = found.nonzero > 0
        rows += int(valid.sum())
        for name, value in found._asdict().items():
            sums[name] = sums.get(name, 0.0) + value[valid].sum()
        w = getattr(reference, f"{op}_weights")(q, k, causal=True, **OPS[op])
        seen = np.tril(np.ones(w.shape[-2:], bool))
        curves.append((int(valid.sum()), reference.analysis.concentration_curve(w, (10.0, 50.0), seen)))
    layer = record["blocks.0.attention"]
    assert layer.rows == 2 * (2 * 9 + 3 * 6)
    assert (layer.null, layer.rows - layer.dead) == (0, rows)
    assert set(layer.means) == set(attnkit.RowStatistics._fields)
    for name, total in sums.items():
        assert_agrees(layer.means[name], total / rows)
    assert_agrees(layer.zeros, 1 - sums["nonzero"] / (2 * (2 * 45 + 3 * 21)))
    for n, percent in enumerate((10.0, 50.0)):
        assert_agrees(layer.concentration[percent], sum(count * curve[n] for count, curve in curves) / rows)


def test_ratios_and_directions_are_those_of_the_reference():
    model = Model().double().eval()
    batches = [tokens(), tokens()]
    with torch.no_grad(), capture(model, residuals=RESIDUALS) as record:
        for x in batches:
            model(x)
    block, residual = model.blocks[0], torch.stack(batches)
    with torch.no_grad():
        branch = torch.stack([block.attention(block.norm(x)) for x in batches])
        middle = residual + branch
        mlp = block.mlp(block.mlp_norm(middle))
    for name, x, r in (("blocks.0.attention", branch, residual), ("blocks.0.mlp", mlp, middle)):
        layer, x, r = record[name], x.numpy(), r.numpy()
        assert layer.calls == 2
        assert_agrees(layer.variance_ratio, reference.analysis.variance_ratio(x, r))
        assert_agrees(layer.variance_ratio_per_token, reference.analysis.variance_ratio(x, r, pooled=False))
        assert_agrees(layer.anisotropy, reference.analysis.anisotropy(x.reshape(-1, 8))[0])


def test_a_branch_that_gets_its_residual_itself():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    x = tokens()
    with torch.no_grad(), capture(model, residuals={"1": "1"}) as record:
        model(x)
    h = model[0](x).detach().numpy()
    assert_agrees(record["1"].variance_ratio, reference.analysis.variance_ratio(np.tanh(h), h))


def test_a_residual_that_comes_by_keyword():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.branch = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.branch(self.norm(input=x))

    model, x = Model().double(), tokens()
    with torch.no_grad(), capture(model, residuals={"branch": "norm"}) as record:
        model(x)
        branch = model.branch(model.norm(x)).numpy()
    assert_agrees(record["branch"].variance_ratio, reference.analysis.variance_ratio(branch, x.numpy()))


def test_padding_is_left_out():
    model = Model().double().eval()
    x, mask = tokens(), torch.arange(10) < torch.tensor([10, 7, 4])[:, None]
    poisoned = torch.where(mask[..., None], x, 1e3)
    with torch.no_grad(), capture(model, residuals=RESIDUALS) as clean:
        clean.token_masks = {"blocks.*": mask}
        model(x, key_mask=mask, query_mask=mask)
    with torch.no_grad(), capture(model, residuals=RESIDUALS) as padded:
        padded.token_masks = {"blocks.*": mask}
        model(poisoned, key_mask=mask)
    with torch.no_grad(), capture(model, residuals=RESIDUALS) as single:
        for n, length in enumerate((10, 7, 4)):
            model(x[n : n + 1, :length])
    for one, two, three in zip(clean.layers, padded.layers, single.layers, strict=True):
        for name in ("variance_ratio", "variance_ratio_per_token", "anisotropy"):
            assert_agrees(getattr(one, name), getattr(two, name))
            assert_agrees(getattr(one, name), getattr(three, name))
        assert one.rows - one.null == two.rows - two.null == three.rows
        for values in ("means", "concentration"):
            for name, value in getattr(one, values).items():
                assert_agrees(value, getattr(two, values)[name])
                assert_agrees(value, getattr(three, values)[name])
    with torch.no_grad(), capture(model, residuals=RESIDUALS) as unmasked:
        model(poisoned, key_mask=mask)
    assert unmasked["blocks.0.mlp"].variance_ratio != padded["blocks.0.mlp"].variance_ratio
    with capture(model) as record:
        record.token_masks = {"*": mask[:, :5]}
        with pytest.raises(ValueError, match="mask has shape"):
            model(x)


def test_the_mask_of_a_record_and_that_of_a_call_both_leave_queries_out():
    attention, x = MultiHeadAttention(8, 2).double().eval(), tokens()
    one, other = (torch.rand(3, 10) < 0.6 for _ in range(2))
    with torch.no_grad(), capture(attention) as record:
        record.token_masks = {"*": one}
        attention(x, query_mask=other)
    assert record[""].rows - record[""].null == 2 * int((one & other).sum())


@pytest.mark.parametrize("mask_name", ["key_mask", "query_mask"])
def test_the_masks_of_a_call_say_what_is_padding(mask_name):
    """Without token_masks: padding holds no output row of attention; as keys of a context, masked ones say nothing."""
    attention, x = MultiHeadAttention(8, 2).double().eval(), tokens()
    mask = torch.arange(10) < torch.tensor([10, 7, 4])[:, None]
    with torch.no_grad(), capture(attention) as record:
        out = attention(x, **{mask_name: mask})
    assert_agrees(record[""].anisotropy, reference.analysis.anisotropy(out[mask].numpy())[0])
    with torch.no_grad(), capture(attention) as record:
        out = attention(x, tokens(3, 10), key_mask=mask)
    assert_agrees(record[""].anisotropy, reference.analysis.anisotropy(out.flatten(0, 1).numpy())[0])


def test_decoding_with_a_cache_and_cross_attention():
    attention = MultiHeadAttention(8, 2, causal=True).double()
    x = tokens(2, 4)
    cache = attention.new_cache(2, 4)
    with torch.no_grad(), capture(attention) as record:
        steps = [attention(x[:, n : n + 1], cache=cache) for n in range(4)]
    assert_close(torch.cat(steps, dim=1), attention(x), LAYER)
    assert (record[""].rows, record[""].means["visible"]) == (16, 2.5)
    cross = MultiHeadAttention(8, 2).double()
    key_mask = torch.arange(6) < torch.tensor([[6], [3]])
    with torch.no_grad(), capture(cross) as record:
        cross(x, tokens(2, 6), key_mask=key_mask)
    assert (record[""].rows, record[""].means["visible"]) == (16, 4.5)


def test_value_slots_of_a_memory():
    model = nn.Sequential(Memory(8, 20), nn.Identity()).double()
    with torch.no_grad(), capture(model) as record:
        model(tokens())
        before = record["0"].slot_anisotropy
        model[0].values.copy_(torch.ones(20, 8))  # as training would
    assert math.isnan(before)
    assert_agrees(record["0"].slot_anisotropy, 1.0)
    assert [layer.name for layer in record.layers] == ["0"]


@pytest.mark.parametrize(
    ("op", "options"), [("pointwise_attention", {"activation": "gelu"}), ("linear_attention", {"scale": -1.0})]
)
def test_negative_weights_have_no_entropy(op, options):
    model = Model(op=op, options=options).double()
    with torch.no_grad(), capture(model) as record:
        model(tokens())
    layer = record["blocks.0.attention"]
    assert set(layer.left_out) == {"entropy", "concentration"}
    assert "entropy" not in layer.means
    assert layer.concentration == {}


def test_what_cannot_be_measured_says_why():
    low_rank = Model(op="nystrom_attention", options={"num_landmarks": 3}).double()
    with torch.no_grad(), capture(low_rank) as record:
        low_rank(tokens())
    assert record["blocks.0.attention"].left_out == {"rows": "nystrom_attention has no row statistics"}
    assert math.isfinite(record["blocks.0.attention"].anisotropy)


def test_table_and_dict():
    model = Model(op="pointwise_attention").double()
    with torch.no_grad(), capture(model, residuals=RESIDUALS, percents=(10.0,)) as record:
        model(tokens())
    lines = str(record).split("\n")
    assert lines[0].split()[:3] == ["module", "rows", "null"]
    assert [line.split()[0] for line in lines[1:]] == list(record.to_dict())
    assert len({len(line) for line in lines}) == 1
    share = next(line for line in lines if line.startswith("blocks.0.attention")).split()[-1]
    assert share == f"{100 * record['blocks.0.attention'].concentration[10.0]:.4g}"
    assert "slot_anisotropy" not in lines[0], "columns without a number are left out"
    held = json.loads(json.dumps(record.to_dict()))
    assert held["blocks.1.attention"]["rows"] == 60
    with torch.no_grad(), capture(model, percents=()) as record:
        model(tokens())
    assert record["blocks.0.attention"].concentration == {}


def test_shares_of_the_table_and_means_of_a_single_row():
    layer, x = MultiHeadAttention(8, 1).double().eval(), tokens(1, 4)
    mask = torch.tensor([[True, False, False, False]])
    with torch.no_grad(), capture(layer) as record:
        layer(x, query_mask=mask)
    header, cells = (line.split() for line in str(record).split("\n"))  # the name of the whole model is empty
    row = dict(zip(header[1:], map(float, cells), strict=False))
    assert (row["null"], row["total"]) == (0.75, 1.0)


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "residuals",
    [{"blocks.*.ffn": "blocks.*.norm"}, {"blocks.*.mlp": "blocks.*.norm2"}, {"blocks.0.mlp": "blocks.*.norm"}],
)
def test_residuals_that_the_model_does_not_have(residuals):
    model = Model()
    with (
        pytest.raises(ValueError, match="capture: residuals must name modules of the model"),
        capture(model, residuals=residuals),
    ):
        pass
    assert hooks(model) == 0


def test_a_branch_before_its_residual():
    model = Model().double()
    residuals = {"blocks.0.attention": "blocks.1.norm"}
    with pytest.raises(RuntimeError, match=r"'blocks.0.attention' ran before"), capture(model, residuals=residuals):
        model(tokens())


# ---------------------------------------------------------------------------------------------- tasks and threads


def test_tasks_and_threads_record_what_they_run():
    """Of one model: two tasks, a third without a block, and a thread that has none and one that has its own."""
    model = MultiHeadAttention(8, 2).eval()

    def run(batch: int) -> None:
        with torch.no_grad():
            model(torch.ones(batch, 3, 8))

    def own_block() -> None:
        with capture(model) as record:
            run(16)
        rows.append(record[""].rows)

    async def inside(batch: int) -> None:
        with capture(model) as record:
            for _ in range(2):
                await asyncio.sleep(0)
                run(batch)
        rows.append(record[""].rows)

    async def outside() -> None:
        await asyncio.sleep(0)
        run(8)

    async def all_of_them() -> None:
        await asyncio.gather(inside(1), inside(2), outside())

    rows: list[int] = []
    asyncio.run(all_of_them())
    assert rows == [2 * 6, 4 * 6]
    with capture(model) as record:
        for work in (lambda: run(1), own_block):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert record[""].rows == 6
    assert rows[2:] == [16 * 6]


class Meeting(nn.Module):
    """A branch in which two threads meet."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2)

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait()
        return x


def test_threads_have_residuals_of_their_own():
    model = nn.Sequential(Meeting())
    with capture(model, residuals={"0": "0"}) as record, ThreadPoolExecutor(2) as pool:
        inputs = torch.randn(2, 1, 4, 8)
        for future in [pool.submit(model, x) for x in inputs]:
            future.result(timeout=20)
    assert record["0"].calls == 2
    assert_close(torch.tensor(record["0"].variance_ratio), torch.tensor(1.0))
