"""The sequence classifier with every method: padding, batch-mates, pooling; and its task: shares, ids, evaluation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnkit.nn import MultiHeadAttention
from attnkit_experiments.data.sequences.dataset import SequenceData, Split, flat, single
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.sequences import task as sequences
from attnkit_experiments.sequences.methods import METHODS
from attnkit_experiments.sequences.model import POOLINGS, ClassifierConfig, SequenceClassifier
from attnkit_experiments.sequences.task import SequenceTask
from tests.library.arrays import LAYER, assert_agrees, assert_close

CPU = torch.device("cpu")
# more tokens than landmarks (64), and several chunks of 64; not a multiple of the windows of 4 and 16
LENGTH, SIZES = 203, (180, 133, 90)
SMALL = {"width": 16, "hidden": 24, "depth": 2}
MODEL = 2 * (LAYER + 2) + 2  # ops that follow one another: blocks with their MLP, a head of two matrices


def classifier(method: str, **changed) -> SequenceClassifier:
    """In float64, in evaluation mode, with embeddings large enough that attention is not a plain mean."""
    torch.manual_seed(0)
    model = SequenceClassifier(ClassifierConfig(20, 3, LENGTH, method=method, **(SMALL | changed))).double().eval()
    with torch.no_grad():
        model.embed.weight.mul_(50)
        model.position.weight.mul_(50)
    return model


def padded(sizes=SIZES, length=LENGTH, towers=1, seed=0) -> torch.Tensor:
    """(B, towers, length) ids 1..19 with 0 behind, the same tokens for the same sizes and seed."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((len(sizes), towers, length), dtype=np.int64)
    for row, size in zip(tokens, sizes, strict=True):
        row[:, :size] = rng.integers(1, 20, (towers, size))
    return torch.from_numpy(tokens)


def task_data(count=40, towers=1, seed=0) -> SequenceData:
    """Which of two tokens is more frequent (1 or 2, of 1 to 3)? Sequences of 4 to 30 tokens."""
    rng = np.random.default_rng(seed)
    held = [rng.integers(1, 4, rng.integers(4, 31)).astype(np.uint8) for _ in range(2 * count * towers)]
    tokens, starts = flat(held)
    rows = np.arange(2 * count * towers).reshape(-1, towers)
    labels = np.array([int((held[row[0]] == 1).sum() > (held[row[0]] == 2).sum()) for row in rows])
    train, test = Split(rows[:count], labels[:count]), Split(rows[count:], labels[count:])
    return SequenceData("more", 4, ("2", "1"), tokens, starts, train, Split(rows[:0], labels[:0]), test)


def task(data=None, *, batch=8, seed=0, pad_to_multiple=0, double=True, **changed) -> SequenceTask:
    data = task_data() if data is None else data
    settings = {"dropout": 0.0, "weight_dropout": 0.0, "towers": data.towers} | SMALL | changed
    made = SequenceTask(
        data,
        ClassifierConfig(data.vocabulary, len(data.classes), 32, **settings),
        batch=batch,
        precision="float32",
        seed=seed,
        device=CPU,
        pad_to_multiple=pad_to_multiple,
    )
    if double:
        made.model.double()
    return made


# ---------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_from_every_parameter(method):
    model = classifier(method, towers=2).train()
    tokens = padded(towers=2)
    loss = torch.nn.functional.cross_entropy(model(tokens), torch.tensor([0, 1, 2]))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # the same number added to all scores of a row is nothing to softmax; floors have no scores, or nothing at all
        unseen = {"zeros": ".attention", "average": (".q_proj", ".k_proj")}.get(method, "k_proj.bias")
        nothing = any(part in name for part in ([unseen] if isinstance(unseen, str) else unseen))
        assert parameter.grad.abs().max() > 0 or nothing, name


@pytest.mark.parametrize("method", METHODS)
def test_logits_depend_on_every_token(method):
    model, tokens = classifier(method), padded()
    changed = tokens.clone()
    changed[0, 0, 100] = tokens[0, 0, 100] % 19 + 1
    one, other = model(tokens), model(changed)
    assert (one[0] - other[0]).abs().max() > 1e-6
    if METHODS[method].alone:
        assert_close(other[1:], one[1:], MODEL)


@pytest.mark.parametrize("method", METHODS)
def test_the_amount_of_padding_changes_nothing_where_that_is_promised(method):
    model = classifier(method)
    more, less = model(padded()), model(padded(length=max(SIZES) + 5))
    if method.startswith("soft"):  # the inverse of A + 0.01·I multiplies rounding by up to 100
        assert_close(less, more, 100 * MODEL)
    elif METHODS[method].any_padding:
        assert_close(less, more, MODEL)
    else:
        assert (more - less).abs().max() > 1e-6, f"{method} could promise more than METHODS says"


@pytest.mark.parametrize("method", METHODS)
def test_the_content_of_padding_changes_nothing(method):
    """For every method: positions of padding may even hold NaN."""
    model, tokens = classifier(method), padded()
    want = model(tokens)
    with torch.no_grad():
        model.position.weight[max(SIZES) :] = float("nan")
    assert_close(model(tokens), want, MODEL)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_samples_one_by_one(method):
    model, tokens = classifier(method), padded()
    together, alone = model(tokens), torch.cat([model(tokens[i : i + 1]) for i in range(len(tokens))])
    if METHODS[method].alone:
        assert_close(together, alone, 100 * MODEL if method.startswith("soft") else MODEL)
    else:
        assert (together - alone).abs().max() > 1e-6, f"{method} could promise more than METHODS says"


def test_a_mask_that_is_forgotten_is_noticed(monkeypatch):
    monkeypatch.setitem(METHODS, "transformer", METHODS["transformer"]._replace(masks=()))
    with pytest.raises(AssertionError):
        test_the_amount_of_padding_changes_nothing_where_that_is_promised("transformer")
    with pytest.raises(AssertionError):
        test_the_content_of_padding_changes_nothing("transformer")


def test_methods_differ_from_each_other():
    """Each with the weights of the seed; those of equal shape start equal."""
    tokens = padded()
    found = {method: classifier(method)(tokens).detach() for method in METHODS}
    names = list(found)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert (found[one] - found[other]).abs().max() > 1e-6, (one, other)


def test_poolings():
    model = classifier("transformer", pool="mean_padded")
    short, long = (padded(sizes=(60,), length=length) for length in (80, 160))
    x, mask = torch.randn(2, 5, 3, dtype=torch.float64), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()
    x[~mask] = float("nan")
    wanted = torch.stack([x[0, :3].mean(0), x[1, 0]])
    assert_close(POOLINGS["masked"](x, mask), wanted)
    assert_close(POOLINGS["mean_padded"](x, mask), wanted * torch.tensor([[3 / 5], [1 / 5]], dtype=torch.float64))
    assert (model(short) - model(long)).abs().max() > 1e-6


def test_pairs_are_read_by_one_encoder_and_compared():
    model, tokens = classifier("transformer", towers=2), padded(towers=2)
    u, v = model.encode(tokens[:, 0]), model.encode(tokens[:, 1])
    assert_close(model(tokens), model.head(torch.cat([u, v, u * v, u - v], -1)), MODEL)
    assert (model(tokens) - model(tokens.flip(1))).abs().max() > 1e-6


def test_a_model_says_what_it_cannot_do():
    with pytest.raises(UserError, match="unknown method 'nystrom'; did you mean 'nystromformer"):
        ClassifierConfig(4, 2, 8, method="nystrom")
    with pytest.raises(UserError, match="unknown pooling 'mean'"):
        ClassifierConfig(4, 2, 8, pool="mean")
    with pytest.raises(ValueError, match="towers must be 1 or 2, got 3"):
        ClassifierConfig(4, 2, 8, towers=3)
    with pytest.raises(ValueError, match="vocabulary must be at least 2"):
        ClassifierConfig(1, 2, 8)
    with pytest.raises(ValueError, match=r"tokens must be \(B, 1, T\) with T at most 203, got \(3, 1, 204\)"):
        classifier("linear")(padded(length=204))


def test_published_sizes():
    """Two layers of 64 with an MLP of 128: the parameters of the softmax model of ListOps, counted by hand."""
    model = SequenceClassifier(ClassifierConfig(16, 10, 2048))
    block = 4 * (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 2 * 2 * 64
    head = 64 * 128 + 128 + 128 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == (16 + 2048) * 64 + 2 * block + 2 * 64 + head
    attentions = {
        name: METHODS[name].build(ClassifierConfig(16, 10, 2048, method=name, weight_dropout=0.1)) for name in METHODS
    }
    assert attentions["linformer"].operands.proj_k.shape == (256, 2048)
    assert attentions["performer"].operands.projection.shape == (256, 32)
    assert attentions["reformer"].rotations.shape == (2, 32, 2, 32)  # 64 buckets
    assert attentions["nystromformer"].value_conv.weight.shape == (2, 1, 35, 1)
    assert attentions["soft"].window == 4
    drops = {name for name, each in attentions.items() if isinstance(each, MultiHeadAttention) and each.dropout}
    assert drops == {"transformer", "relu"}


# ---------------------------------------------------------------------------------------------- task


def test_sample_ids_are_a_function_of_seed_and_step():
    one, two = task(), task()
    steps = [one.sample_ids(step) for step in range(5)]
    assert np.array_equal(two.sample_ids(3), steps[3])
    assert sorted(np.concatenate(steps)) == list(range(40))
    assert not np.array_equal(task(seed=1).sample_ids(0), steps[0])


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].alone])
def test_shares_of_slices_add_up_to_the_loss_of_the_batch(method, towers):
    made = task(task_data(towers=towers), method=method)
    ids = made.sample_ids(0)
    whole = made.loss(ids, 0, slice(None))
    shares = [made.loss(ids, 0, own) for own in (slice(0, 3), slice(3, 4), slice(4, None))]
    assert_close(sum(shares), whole, 100 * MODEL if method.startswith("soft") else MODEL)
    logits = made.model(made.padded(made.data.train.rows[ids], 32))
    labels = torch.from_numpy(made.data.train.labels[ids])
    assert_close(whole, torch.nn.functional.cross_entropy(logits, labels), MODEL)


def test_gradients_of_shares_add_up(monkeypatch):
    made, ids = task(), np.arange(8)

    def gradient(*slices):
        made.model.zero_grad()
        for own in slices:
            made.loss(ids, 0, own).backward()
        return made.model.head[0].weight.grad.clone()

    assert_close(gradient(slice(0, 5), slice(5, 8)), gradient(slice(0, 8)), 2 * MODEL)

    def mean_of_the_share(logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels) * len(ids)

    monkeypatch.setattr(sequences, "nats", mean_of_the_share)
    with pytest.raises(AssertionError):
        assert_close(gradient(slice(0, 5), slice(5, 8)), gradient(slice(0, 8)), 2 * MODEL)


def test_dropout_is_a_function_of_seed_and_step_and_leaves_torchs_generator_alone():
    made, ids, all_of_them = task(dropout=0.3, weight_dropout=0.3), np.arange(8), slice(0, 8)
    torch.manual_seed(1)
    first = made.loss(ids, 4, all_of_them)
    drawn = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(made.loss(ids, 4, all_of_them), first)
    assert not torch.equal(made.loss(ids, 5, all_of_them), first)
    assert not torch.equal(task(dropout=0.3, seed=1).loss(ids, 4, all_of_them), first)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)


def test_loss_calls_what_the_loop_has_wrapped_and_evaluation_the_model():
    """Under DistributedDataParallel only one process evaluates."""
    made, ids, called = task(), np.arange(8), []

    def wrapped(tokens):
        called.append(tokens.shape)
        return made.model(tokens)

    made.apply = wrapped
    made.loss(ids, 0, slice(0, 3))
    made.evaluate()
    assert called == [(3, 1, 32)]


def test_evaluation_counts_right_answers():
    made = task(batch=7)  # 40 test samples: the last batch is smaller
    made.model.eval()
    rows, labels = made.data.test.rows, torch.from_numpy(made.data.test.labels)
    logits = torch.cat([made.model(made.padded(rows[i : i + 1], 32)) for i in range(40)]).float()
    found = made.evaluate()
    assert found["accuracy"] == (logits.argmax(1) == labels).float().mean().item()
    assert_agrees(found["test_loss"], torch.nn.functional.cross_entropy(logits, labels), dtype="float32")
    assert found["majority"] == made.data.majority() > 0
    assert set(found) == {"accuracy", "test_loss", "majority"}
    with_valid = task(replace(made.data, valid=made.data.test), batch=7)
    with_valid.model.eval()
    found = with_valid.evaluate()
    assert found["valid_accuracy"] == found["accuracy"]
    assert found["valid_loss"] == found["test_loss"]


def test_padding_to_the_longest_changes_no_loss():
    made, own = task(pad_to_multiple=4), slice(2, 6)
    ids = np.flatnonzero(made.data.lengths[:40] < 22)
    longest = made.data.lengths[ids].max()
    assert made.width_of(made.data.train.rows[ids]) == -(-longest // 4) * 4 < 32
    assert_close(made.loss(ids, 0, own), task().loss(ids, 0, own), MODEL)
    assert made.width_of(np.array([[made.data.lengths.argmax()]])) == 32
    tokens = made.padded(np.array([[3]]), 32)
    size = made.data.lengths[3]
    assert tokens[0, 0, :size].tolist() == made.data.sequence(3).tolist()
    assert tokens[0, 0, size:].tolist() == [0] * (32 - size)


def test_a_task_says_what_does_not_fit():
    data = task_data()
    for changed, match in (
        ({"method": "reformer", "pad_to_multiple": 4}, "must be 0 for reformer with masked pooling"),
        ({"pool": "mean_padded", "pad_to_multiple": 4}, "must be 0 for transformer with mean_padded"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"towers": 2}, "towers of the model must be 1 for more, got 2"),
    ):
        with pytest.raises(ValueError, match=match):
            task(data, **changed)
    long = replace(
        data,
        tokens=np.ones(100, dtype=np.uint8),
        starts=np.array([0, 60, 100]),
        train=single(0, np.ones(1, int)),
        test=single(1, np.ones(1, int)),
    )
    with pytest.raises(ValueError, match="length must hold 60 tokens for more, got 32"):
        task(long)


@pytest.mark.parametrize("method", ["transformer", "soft", "linear", "relu"])
def test_a_few_steps_learn_an_easy_task(method):
    """Which token is more frequent is linear in mean-pooled embeddings."""
    made = task(task_data(count=64), batch=32, method=method, double=False)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    losses = []
    for step in range(40):
        ids = made.sample_ids(step)
        loss = made.loss(ids, step, slice(0, len(ids)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    made.model.eval()
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert made.evaluate()["accuracy"] > made.data.majority() + 0.15


def test_every_method_says_what_it_is():
    for name, method in METHODS.items():
        assert method.about, name
        assert set(method.masks) in ({"key_mask", "query_mask"}, {"token_mask"}), name
