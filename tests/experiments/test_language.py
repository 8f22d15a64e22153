"""The language model: what a byte may depend on, its tasks, its text, exact statistics, and its recipes."""

import dataclasses
import gzip
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.data.text.bytes import load_text
from attnkit_experiments.data.text.symbols import generate
from attnkit_experiments.engine.counting import by_formula
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.sampler import generator
from attnkit_experiments.images.model import SIZES
from attnkit_experiments.language import exact
from attnkit_experiments.language.domain import DOMAIN, LanguageStudy
from attnkit_experiments.language.model import LanguageConfig, LanguageModel, forward_flops
from attnkit_experiments.language.targets import Draw, copied, masked
from attnkit_experiments.language.task import LanguageTask, windows
from attnkit_experiments.report.results import read_study
from attnkit_experiments.study.recipe import Source
from tests.library.arrays import LAYER, assert_agrees, assert_close

RELU = LanguageConfig(
    size="d64", length=12, op="pointwise_attention", options={"activation": "relu", "alpha": 1.0}, qk_norm=True
)
MODEL = 4 * (LAYER + 2) + 2  # ops that follow one another: blocks with their MLP, a norm, the head
SOFTMAX = dataclasses.replace(RELU, op="softmax_attention", options={})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """2,000 bytes of two words in turn, in two files."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.en.gz").write_bytes(gzip.compress(b"sea and " * 125))
    (folder / "b.en.gz").write_bytes(gzip.compress(b"air and " * 125))
    (folder / "c.de.gz").write_bytes(b"not gzip")
    return load_text(str(folder), "*.en.gz")


QUADRATURE = 1e-10  # ten times what exact.moment asks of its integrals


def model_of(config):
    torch.manual_seed(0)
    model = LanguageModel(config)
    torch.nn.init.normal_(model.head.weight)
    return model


MASK = 256


def drawn(windows, seed=0):
    return Draw(torch.Generator().manual_seed(seed), slice(None), len(windows), 256)


def task_of(data, config=RELU, **changes):
    how = {"batch": 4, "tested": 0, "precision": "float32", "seed": 0, "device": torch.device("cpu")}
    return LanguageTask(data, config, **how | changes)


@pytest.mark.parametrize("config", [RELU, SOFTMAX], ids=["relu", "softmax"])
def test_a_byte_depends_on_nothing_behind_it(config):
    """Neither on later bytes nor on how many there are: the divisor is the number of keys that are seen."""
    tokens = torch.arange(24).reshape(2, 12) * 7 % 256
    model = model_of(config).double()
    whole = model(tokens)
    assert_close(model(tokens[:, :5]), whole[:, :5], MODEL)
    changed = tokens.clone()
    changed[:, 5:] += 1
    assert torch.equal(model(changed)[:, :5], whole[:, :5])
    assert not torch.allclose(model(changed)[:, 6:], whole[:, 6:])
    earlier = tokens.clone()
    earlier[:, 0] += 1
    assert not torch.allclose(model(earlier)[:, 5:], whole[:, 5:])


def test_a_new_model_needs_eight_bits_a_byte_and_shares_add_up(data):
    task = task_of(data)
    found = task.evaluate()
    assert_agrees(found["bits_per_byte"], 8.0, dtype="float32")
    torch.nn.init.normal_(task.model.head.weight, generator=torch.Generator().manual_seed(0))
    ids = task.sample_ids(3)
    parts = [task.loss(ids, 3, slice(a, b)) for a, b in ((0, 1), (1, 4))]
    assert_close(sum(parts), task.loss(ids, 3, slice(0, 4)), MODEL)
    found = task.evaluate()
    assert_close(found["test_loss"], found["bits_per_byte"] * math.log(2))
    assert found["first_quarter"] != found["last_quarter"]
    logits = task.model(task.tested_sample(0, windows(len(data.test), 12)).tokens).detach()
    following = torch.from_numpy(data.test[1 : logits.shape[0] * 12 + 1].astype(np.int64)).reshape(-1, 12)
    by_hand = -logits.log_softmax(-1).gather(-1, following[..., None]).mean() / math.log(2)
    assert_agrees(found["bits_per_byte"], by_hand, MODEL, dtype="float32")


def test_windows_follow_one_another_and_end_with_a_byte_behind_the_last(data):
    task = task_of(data)
    tokens, following, counts = task.sample(task.train, np.array([0, 3]), torch.Generator())
    assert counts.all()
    assert bytes(tokens[0].tolist()) == b"sea and sea "
    assert bytes(following[0].tolist()) == b"ea and sea a"
    assert tokens[1].tolist() == data.train[36:48].tolist()
    assert windows(25, 12) == 2
    assert windows(24, 12) == 1
    assert task_of(data, tested=3).tested_ids().tolist() == [0, 5, 10]


def test_counted_operations_are_those_of_pairs_that_see_each_other():
    config = dataclasses.replace(RELU, gate="silu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        by_formula(LanguageModel(config))(torch.zeros(1, 12, dtype=torch.long))
    unseen = 12 * 11 // 2 * 64 * 2 * 2 * 4  # features, products, operations, layers
    assert counter.get_total_flops() == forward_flops(config) + unseen
    assert counter.get_total_flops() == forward_flops(dataclasses.replace(config, causal=False))


def test_fifteen_percent_of_the_bytes_are_masked():
    windows = torch.arange(4000).reshape(4, 1000).remainder(256)
    tokens, targets, counts = masked(windows[:, :101], drawn(windows))
    assert torch.equal(targets, windows[:, :100])
    assert counts.sum(1).tolist() == [15] * 4
    assert torch.equal(tokens[~counts], targets[~counts])
    tokens, targets, counts = masked(windows.repeat(50, 1), drawn(windows.repeat(50, 1), 1))
    shares = [(each & counts).sum() / counts.sum() for each in (tokens == MASK, tokens == targets)]
    assert_close(torch.tensor(shares), torch.tensor([0.8, 0.1 + 0.1 / 256]), magnitude=1e4)
    assert masked(windows[:, :3], drawn(windows))[2].sum(1).tolist() == [1] * 4


def test_a_model_of_masked_bytes_sees_both_sides_and_its_shares_add_up(data):
    task = task_of(data, dataclasses.replace(RELU, causal=False), kind="masked")
    torch.nn.init.normal_(task.model.head.weight, generator=torch.Generator().manual_seed(0))
    ids = task.sample_ids(3)
    parts = [task.loss(ids, 3, slice(a, b)) for a, b in ((0, 1), (1, 4))]
    assert_close(sum(parts), task.loss(ids, 3, slice(0, 4)), MODEL)
    assert task.loss(ids, 4, slice(0, 4)) != task.loss(ids, 3, slice(0, 4)), "other masks"
    tokens, targets, counts = task.sample(task.train, ids, generator(task.seed, 3, "masks"))
    by_hand = -task.model(tokens).log_softmax(-1).gather(-1, targets[..., None])[..., 0][counts].mean()
    assert_close(task.loss(ids, 3, slice(0, 4)), by_hand, MODEL)
    tokens = torch.arange(24).reshape(2, 12)
    changed = tokens.clone()
    changed[:, -1] = MASK
    assert not torch.allclose(task.model(changed)[:, 0], task.model(tokens)[:, 0])
    found = task.evaluate()
    tokens, targets, counts = task.tested_sample(0, 1000)
    logits = task.model(tokens).detach()
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0][counts].mean()
    assert_agrees(found["test_loss"], by_hand, MODEL, dtype="float32")
    assert_agrees(found["accuracy"], (logits.argmax(-1) == targets)[counts].double().mean(), dtype="float32")
    assert "first_quarter" not in found


def test_a_copy_is_determined_by_what_is_copied():
    data = generate(16)
    windows = torch.from_numpy(data.test[:-1].copy()).long().reshape(-1, 16)
    assert not windows[:, ::8].any()
    assert torch.equal(windows[:, :8], windows[:, 8:])
    assert windows[:, 1:8].unique().tolist() == [*range(1, 11)]
    assert not torch.equal(windows[0], windows[1])
    row = torch.from_numpy(data.test[:17].copy()).long()[None]
    tokens, targets, counts = copied(row, drawn(row))
    assert torch.equal(tokens, row[:, :16])
    assert torch.equal(targets[counts], row[0, 1:8])


def test_the_task_says_what_data_it_needs(tmp_path):
    for task, place, need in (("copying", "pydoc", "generated"), ("masked", "generated", "text")):
        with pytest.raises(UserError, match=f"--data {place}: the task {task} needs {need}"):
            DOMAIN.load(Source(place, LanguageStudy(task=task), tmp_path))
    assert DOMAIN.load(Source(DOMAIN.source(), LanguageStudy(task="copying", length=8), tmp_path)).name == "copying"


def test_linear_attention_learns_to_copy(monkeypatch):
    monkeypatch.setitem(SIZES, "shallow", (64, 2, 128, 2))
    config = LanguageConfig(size="shallow", length=8, op="linear_attention")
    task = task_of(generate(8), config, kind="copying", batch=32, tested=200)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    for step in range(120):
        optimizer.zero_grad()
        task.loss(task.sample_ids(step), step, slice(0, 32)).backward()
        optimizer.step()
    assert task.evaluate()["accuracy"] > 0.5


def test_text_is_read_in_order_and_its_end_held_out(data, tmp_path, monkeypatch):
    assert (len(data.train), len(data.test), data.files) == (1800, 200, 2)
    assert bytes(data.train[:900]) == (b"sea and " * 125)[:900]
    assert bytes(data.test) == (b"sea and " * 125)[900:] + (b"air and " * 125)[900:]
    (tmp_path / "one.txt").write_bytes(b"x" * 30)
    assert len(load_text(str(tmp_path / "one.txt"), "*").test) == 3
    with pytest.raises(UserError, match=r"holds no file like \*\.fr; another pattern is --set files=PATTERN"):
        load_text(str(tmp_path), "*.fr")
    with pytest.raises(UserError, match="no such file or directory"):
        load_text(str(tmp_path / "nothing"), "*")
    (tmp_path / "torn.gz").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"torn.gz: cannot be read"):
        load_text(str(tmp_path), "*.gz")
    monkeypatch.delenv("ATTNKIT_DATA", raising=False)
    assert len(DOMAIN.load(Source(DOMAIN.source(), LanguageStudy(), tmp_path)).train) > 100_000


@pytest.mark.parametrize("activation", exact.ACTIVATIONS)
def test_row_sums_and_variances_before_training_are_the_exact_ones(activation):
    for alpha in (0.0, 0.5, 1.0, 2.0):
        for length in (64, 8192):
            assert exact.holds(exact.at_start(activation, alpha, length)), (alpha, length)


def test_exact_moments_are_those_of_the_sphere():
    """E relu(√d·u)² = d/(2m), E|√d·u| = √d Γ(m/2)/(√π Γ((m + 1)/2)), m = d - 1."""
    relu, identity = exact.ACTIVATIONS["relu"], exact.ACTIVATIONS["identity"]
    assert exact.moment(relu, 2) == pytest.approx(64 / 63 / 2, rel=QUADRATURE)
    by_hand = 4 * math.sqrt(1 / math.pi) * math.exp(math.lgamma(63 / 2) - math.lgamma(32))
    assert exact.moment(relu, 1) == pytest.approx(by_hand, rel=QUADRATURE)
    assert exact.moment(identity, 4) == pytest.approx(3 * 64**2 / (63 * 65), rel=QUADRATURE)


def test_a_divisor_that_is_not_the_length_is_noticed(monkeypatch):
    right = exact.attnkit.pointwise_attention_weights
    monkeypatch.setattr(
        exact.attnkit,
        "pointwise_attention_weights",
        lambda q, k, **own: right(q, k, length=k.shape[-2] + 100, **own),
    )
    assert not exact.holds(exact.at_start("relu", 1.0, 8192))


def test_one_evaluation_makes_no_figure_against_time(tmp_path, undrawn):
    settings = ("steps=2", "length=16", "tokens=64", "checkpoint_every=2", "tested=4", "alphas=1.0")
    request = runner.Request("000-causal", "cpu", "pydoc", tmp_path, settings, seeds=(0,), threads=1, device="cpu")
    page = write_report(runner.run(request)).read_text()
    assert "Learning curves" in page
    assert "Bits per byte against time" not in page


@pytest.mark.parametrize(
    ("recipe", "data", "own"), [("000-masked", "pydoc", ()), ("003-copying", "generated", ("methods=softmax,linear",))]
)
def test_recipes_of_other_tasks_report_quality_by_seconds(recipe, data, own, tmp_path, undrawn):
    settings = (*own, "steps=4", "length=16", "tokens=64", "checkpoint_every=2", "evaluate_every=2", "tested=4")
    request = runner.Request(recipe, "cpu", data, tmp_path / "out", settings, seeds=(0, 1), threads=1, device="cpu")
    out = runner.run(request)
    page = write_report(out).read_text()
    assert "Bits per byte against time" in page
    assert ("Row i sees" in page) == (recipe != "000-masked")
    assert "not counted" not in page
    line = read_study(out).by_name("softmax")
    ms = [result["step_ms"] for result in line.results.values()]
    (first, _), (last, bits) = line.scores("bits_per_byte")
    assert_close(torch.tensor([first, last]), torch.tensor([2, 4]) * sum(ms) / 2000)
    assert_agrees(bits, line.over_seeds("bits_per_byte").mean)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["task=copying", "length=9"], "length must be even and at least 4 for copying, got 9"),
        (["length=1"], "length must be at least 2, got 1"),
        (["length=64", "tokens=32"], "tokens must hold a window of 64 bytes, got 32"),
        (["length=60000", "tokens=60000"], "length 60,000 does not fit into the 46,611 test bytes of pydoc"),
        (["tested=-1"], "tested must be at least 0"),
        (["model=S16"], "unknown model size 'S16'"),
    ],
)
def test_settings_that_do_not_fit_are_named(words, text, tmp_path, capsys):
    given = [part for word in words for part in ("--set", word)]
    assert main(["run", "000-causal", *given, "--data", "pydoc", "--out", str(tmp_path / "out")]) == 2
    assert text.partition("46,611")[0] in capsys.readouterr().err
