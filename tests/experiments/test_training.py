"""Schedule, optimiser, metrics, checkpoints that are torn or foreign, and a loss that is not finite."""

import itertools
import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from attnkit.nn import MultiHeadAttention
from attnkit_experiments.engine import checkpoint, diagnosis, train
from attnkit_experiments.engine.errors import Diverged, UserError
from attnkit_experiments.engine.files import read_json, sha256, written_aside
from attnkit_experiments.engine.metrics import Metrics, read_metrics
from attnkit_experiments.engine.optim import TrainConfig, learning_rate, make_optimizer
from attnkit_experiments.images.task import ImageTask
from tests.experiments.doubles import in_float64
from tests.experiments.stopping import stopped_after
from tests.library.arrays import assert_agrees, assert_close


@pytest.fixture(scope="module")
def often(tiny):
    """`tiny` with checkpoints on the way."""
    return lambda out, *settings, **options: tiny(out, "checkpoint_every=2", *settings, **options)


def test_warmup_is_linear_and_cosine_ends_at_zero():
    config = TrainConfig(steps=100, lr=0.5, warmup=10)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[:10] == [0.5 * (step + 1) / 10 for step in range(10)]
    assert rates[10] == 0.5
    assert_close(rates[55], 0.25)
    assert rates[100] == 0
    assert rates[10:] == sorted(set(rates[10:]), reverse=True)


def test_a_schedule_of_warmup_alone_and_of_none():
    assert learning_rate(3, TrainConfig(steps=4, lr=1.0, warmup=4)) == 1
    assert learning_rate(0, TrainConfig(steps=4, lr=1.0, warmup=0)) == 1


def test_inverse_sqrt_peaks_after_the_warmup_and_halves_at_four_times_it():
    config = TrainConfig(steps=400, lr=0.5, warmup=100, schedule="inverse_sqrt")
    rates = [learning_rate(step, config) for step in range(400)]
    assert max(rates) == rates[99] == 0.5
    assert rates[49] == 0.25
    assert_close(rates[399], 0.25)


def test_onecycle_is_the_one_of_torch():
    config = TrainConfig(steps=50, lr=0.5, warmup=10, schedule="onecycle")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=50, pct_start=10 / 50, anneal_strategy="linear"
    )
    for step in range(50):
        assert_close(learning_rate(step, config), theirs.get_last_lr()[0], magnitude=0.5)
        optimizer.step()
        if step < 49:
            theirs.step()


def test_bad_training_settings_are_named():
    with pytest.raises(ValueError, match="schedule must be one of cosine, inverse_sqrt, onecycle; got 'step'"):
        TrainConfig(steps=1, schedule="step")


def test_only_the_matrices_of_linear_maps_decay():
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
    model.position = nn.Parameter(torch.zeros(5, 4))
    decayed, others = make_optimizer(model, TrainConfig(steps=1, weight_decay=0.3)).param_groups
    assert [p is model["a"].weight for p in decayed["params"]] == [True]
    assert decayed["weight_decay"] == 0.3
    assert others["weight_decay"] == 0
    assert len(others["params"]) == 4


def test_the_last_step_that_was_evaluated_is_not_the_last_one(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", keep_until=0) as metrics:
        metrics.write({"step": 2, "evaluation": {"accuracy": 0.5}})
        metrics.write({"step": 3, "loss": 1.0})
    assert metrics.evaluated == 2


def test_metrics_hold_every_step(often, tmp_path):
    rows = read_metrics(often(tmp_path / "out", "steps=3") / "cells" / "relu-alpha1-seed0" / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {"loss", "lr", "grad_norm", "ids", "samples_per_s", "seconds"} <= steps[0].keys()
    assert [row["step"] for row in rows if "evaluation" in row] == [3]


def test_a_machine_may_sleep_during_a_step(often, tmp_path, monkeypatch):
    """A step that seems to take hours has a speed that is not 0, by which the summary divides."""
    clock = itertools.count(step=10_000.0)
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    cell = often(tmp_path / "out", "steps=3") / "cells" / "relu-alpha1-seed0"
    speeds = [row["samples_per_s"] for row in read_metrics(cell / "metrics.jsonl") if "loss" in row]
    assert len(speeds) == 3
    assert all(0 < speed < 0.01 for speed in speeds)
    assert read_json(cell / "result.json")["step_ms"] >= 1e7


def test_half_precision_trains(often, whole, tmp_path):
    out = often(tmp_path / "out", "precision=bfloat16")
    rows = read_metrics(out / "cells" / "relu-alpha1-seed0" / "metrics.jsonl")
    full = read_metrics(whole / "cells" / "relu-alpha1-seed0" / "metrics.jsonl")
    assert rows[-2]["loss"] != full[-2]["loss"]
    weights = load_file(out / "cells" / "relu-alpha1-seed0" / "weights.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_variants_train_on_the_same_samples_from_the_same_weights(often, tmp_path):
    cells = often(tmp_path / "out", "alphas=0,1") / "cells"
    first, second = (read_metrics(cells / f"relu-alpha{a}-seed0" / "metrics.jsonl") for a in (0, 1))
    assert [row.get("ids") for row in first] == [row.get("ids") for row in second]
    assert first[0]["loss"] == second[0]["loss"], "a head of zeros answers the same whatever the attention"
    assert first[-2]["loss"] != second[-2]["loss"]


def test_a_loss_that_is_not_finite_stops_with_a_diagnosis(often, tmp_path):
    with pytest.raises(Diverged) as stopped:
        often(tmp_path / "out", "lr=1e30", "warmup=0")
    text = str(stopped.value)
    assert "[1/2] relu-alpha1-seed0: diverged at step" in text
    assert "the last finite step was 1 with loss 2.3" in text
    assert "--keep-going" in text
    assert "the first output that is not finite is that of " in text
    often(tmp_path / "out", "lr=1e30", "warmup=0", resume=True, keep_going=True)
    result = json.loads((tmp_path / "out" / "cells" / "relu-alpha1-seed0" / "result.json").read_text())
    assert "diverged at step" in result["diverged"]


def block(broken):
    """Two layers of attention; with `broken` the second has a weight that overflows."""
    torch.manual_seed(0)
    layers = nn.ModuleList(MultiHeadAttention(8, 2) for _ in range(2))
    if broken:
        with torch.no_grad():
            layers[1].v_proj.weight.fill_(torch.inf)
    return nn.ModuleDict({"layers": layers})


@pytest.mark.parametrize("broken", [True, False])
def test_the_diagnosis_names_the_first_layer_and_what_came_before_it(broken):
    model, x = block(broken), torch.randn(2, 5, 8)

    def forward():
        y = x
        for layer in model["layers"]:
            y = layer(y)
        return y.square().mean()

    text = diagnosis.first_bad_layer(model, forward)
    if broken:
        assert "the first output that is not finite is that of layers.1.v_proj, input variance 0." in text
        assert "output variance/entropy of the attention layers before it: layers.0 " in text
        assert "layers.1 " not in text
    else:
        assert text == "with the weights as they are now the same step is finite"


def test_the_diagnosis_names_gradients_where_only_they_overflow():
    model = nn.Linear(2, 1)
    model.bias.grad, model.weight.grad = torch.tensor([torch.inf]), torch.zeros(1, 2)
    text = diagnosis.first_bad_layer(model, lambda: model(torch.ones(1, 2)).sum())
    assert text == "the forward pass is finite, the gradients of 1 parameters are not, bias among them"


def test_a_diverged_run_keeps_its_last_good_checkpoint(often, tmp_path, monkeypatch):
    loss = ImageTask.loss
    monkeypatch.setattr(
        ImageTask, "loss", lambda self, ids, step, own: loss(self, ids, step, own) * (torch.nan if step == 4 else 1)
    )
    with pytest.raises(Diverged, match=r"diverged at step 5.*all modules are finite, the loss computed from them is"):
        often(tmp_path / "out")
    checkpoints = tmp_path / "out" / "cells" / "relu-alpha1-seed0" / "checkpoints"
    assert [path.stem for path in checkpoint.seals(checkpoints)] == ["step-00000002", "step-00000004"]
    stored = load_file(shard(checkpoint.seals(checkpoints)[-1]))
    assert all(bool(torch.isfinite(x).all()) for x in stored.values())


def test_parts_of_a_batch_give_the_same_run(often, tmp_path):
    with in_float64():
        whole, parts = (often(tmp_path / name, f"accumulate={n}") for name, n in (("whole", 1), ("parts", 3)))
    rows, others = (read_metrics(out / "cells" / "relu-alpha1-seed0" / "metrics.jsonl") for out in (whole, parts))
    for row, other in zip(rows[:-1], others[:-1], strict=True):
        for name in ("loss", "grad_norm"):  # written down in float32
            assert_agrees(other[name], row[name], dtype="float32")


@pytest.fixture(scope="module")
def stopped(often, tmp_path_factory):
    """A study stopped after the checkpoint of step 4 of 6."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with stopped_after(4):
        often(out)
    return out


@pytest.fixture
def interrupted(stopped, tmp_path):
    """The same, to write to; returns (out, checkpoints of its first cell)."""
    out = shutil.copytree(stopped, tmp_path / "out")
    return out, out / "cells" / "relu-alpha1-seed0" / "checkpoints"


@pytest.fixture(scope="module")
def whole(often, tmp_path_factory):
    """The study that was not stopped."""
    return often(tmp_path_factory.mktemp("whole") / "out")


def assert_equal_cells(out, whole):
    """Bit for bit in their weights."""
    for cell in ("relu-alpha1-seed0", "relu-alpha1-gate-seed0"):
        ours, theirs = (load_file(folder / "cells" / cell / "weights.safetensors") for folder in (out, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_resuming_gives_the_weights_of_an_uninterrupted_run(often, interrupted, whole):
    out, checkpoints = interrupted
    names = sorted(path.name for path in checkpoints.iterdir())
    assert [name.partition("-")[2][:8] for name in names] == ["00000002"] * 2 + ["00000004"] * 2
    assert [path.name for path in checkpoint.seals(checkpoints)] == ["step-00000002.json", "step-00000004.json"]
    often(out, resume=True)
    assert_equal_cells(out, whole)


def shard(seal):
    """The file of a checkpoint of one process."""
    (file,) = seal.with_name(json.loads(seal.read_text())["folder"]).iterdir()
    return file


def tear(seal):
    file = shard(seal)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage(seal):
    content = bytearray(shard(seal).read_bytes())
    content[-3] ^= 1
    shard(seal).write_bytes(bytes(content))


def empty(seal):
    shard(seal).write_bytes(b"")


def remove(seal):
    shard(seal).unlink()


def sealed(seal):
    about = json.loads(seal.read_text())
    seal.write_text(json.dumps(about | {"files": {shard(seal).name: sha256(shard(seal))}}))


def strange(seal):
    save_file({"x": torch.zeros(3)}, shard(seal))
    sealed(seal)


def torn_before_it_was_sealed(seal):
    tear(seal)
    sealed(seal)


def torn_seal(seal):
    seal.write_text('{"format": "attn')


def strange_seal(seal):
    seal.write_text('{"format": "something else"}')


DAMAGED = "it is damaged: its SHA-256 differs from the one in step-00000004.json"
SPOILT = [
    (tear, "-", DAMAGED),
    (damage, "-", DAMAGED),
    (empty, "-", DAMAGED),
    (remove, "-", "step-00000004.json seals it, but it is not there"),
    (strange, "-", "it has no tensor model."),
    (torn_before_it_was_sealed, "-", "it is no checkpoint"),
    (torn_seal, ".json", "cannot be read as JSON"),
    (strange_seal, ".json", "format must be one of 'attnkit-experiments-checkpoint-2', got 'something else'"),
]


@pytest.mark.parametrize(("spoil", "file", "reason"), SPOILT)
def test_spoiled_checkpoints_are_refused_by_name_and_reason(spoil, file, reason, often, interrupted):
    out, checkpoints = interrupted
    for seal in checkpoint.seals(checkpoints):
        spoil(seal)
    with pytest.raises(UserError) as refused:
        often(out, resume=True)
    assert f"{checkpoints / 'step-00000004'}{file}" in str(refused.value)
    assert reason in str(refused.value)
    assert "--overwrite relu-alpha1-seed0 starts the cell anew" in str(refused.value)
    assert "\n" not in str(refused.value)
    if spoil is strange_seal:  # of them all: it trains from the beginning
        often(out, overwrite=("relu-alpha1-seed0",))


def test_a_spoiled_checkpoint_falls_back_to_the_one_before(often, interrupted, whole, capsys):
    out, checkpoints = interrupted
    tear(checkpoints / "step-00000004.json")
    often(out, resume=True)
    said = capsys.readouterr().out
    assert f".safetensors: refused: {DAMAGED}; going on from step 2\n" in said
    assert_equal_cells(out, whole)


def test_a_checkpoint_that_was_not_sealed_is_none_and_is_removed(often, interrupted, whole):
    """Its process was killed while it wrote."""
    out, checkpoints = interrupted
    seal = checkpoints / "step-00000004.json"
    tear(seal)
    torn = shard(seal).parent
    seal.unlink()
    often(out, resume=True)
    assert not torn.exists()
    assert_equal_cells(out, whole)


def test_what_is_saved_is_the_state_of_its_step_whatever_is_trained_meanwhile(tmp_path, monkeypatch):
    """Its files are written only after the next step here, and its seal after them."""
    model, may_write, write = nn.Linear(3, 2), threading.Event(), HuggingFaceStorageWriter.write_data

    def write_late(*given):
        assert may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write_late)
    optimizer = make_optimizer(model, TrainConfig(steps=1))
    with checkpoint.Checkpoints(tmp_path, config_hash="x", model=model, optimizer=optimizer) as checkpoints:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        checkpoints.save(step=1, seconds=0.0)
        optimizer.step()
        assert not checkpoint.seals(tmp_path)
        may_write.set()
    moved = {name: x.clone() for name, x in model.state_dict().items()}
    assert not any(torch.equal(moved[name], x) for name, x in expected.items())
    with checkpoint.Checkpoints(tmp_path, config_hash="x", model=model, optimizer=optimizer) as checkpoints:
        assert checkpoints.restore() == (1, 0.0)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in expected.items())
    assert optimizer.state[model.weight]["step"] == 1


def test_a_damaged_line_of_metrics_costs_that_line(often, interrupted, tmp_path):
    out, checkpoints = interrupted
    file = checkpoints.parent / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b'{"step": 2, "lo\xff', b"[1]", *lines[2:]]))
    often(out, resume=True)
    assert [row["step"] for row in read_metrics(file) if "loss" in row] == [1, 3, 4, 5, 6]


def test_a_damaged_line_of_the_last_evaluation_is_evaluated_again(often, whole, tmp_path):
    with stopped_after(6):
        often(tmp_path / "out")
    file = tmp_path / "out" / "cells" / "relu-alpha1-seed0" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    assert "evaluation" in lines.pop()
    file.write_text("\n".join(lines))
    often(tmp_path / "out", resume=True)
    expected = read_metrics(whole / file.relative_to(tmp_path / "out"))
    assert read_metrics(file)[-1] == expected[-1]


def test_a_checkpoint_of_another_configuration_is_refused(often, interrupted, tmp_path):
    out, checkpoints = interrupted
    other = often(tmp_path / "other", seeds=(1,)) / "cells" / "relu-alpha1-seed1" / "checkpoints"
    shutil.copytree(other, checkpoints, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"step-00000006.json: refused: it belongs to another configuration"):
        often(out, resume=True)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with written_aside(path) as aside:
            aside.write_text("half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
