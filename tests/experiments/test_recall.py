"""Multi-query associative recall and the layers that are compared on it: one right answer, and no look ahead."""

import numpy as np
import pytest
import torch

from attnkit_experiments.data.text import keys_values
from attnkit_experiments.data.text.keys_values import RecallRules, generate, keys_of
from attnkit_experiments.evidence.runs import FLOOR
from attnkit_experiments.language.domain import require_parts
from attnkit_experiments.language.methods import METHODS
from attnkit_experiments.language.model import LanguageConfig, LanguageModel
from attnkit_experiments.language.targets import Draw, recall

RULES = RecallRules(length=20, pairs=3, vocabulary=16, train=120, test=30)


@pytest.fixture(scope="module")
def data():
    return generate(RULES)


def windows_of(part):
    return np.stack([part[at : at + RULES.length + 1] for at in range(0, len(part) - 1, RULES.length)]).astype(int)


def check_answers(part):
    """Each query has a key of the first half of its window, of which there is one value, and that is what counts."""
    rows = torch.from_numpy(windows_of(part))
    tokens, targets, counts = recall(rows, Draw(torch.Generator(), slice(None), len(rows), RULES.vocabulary))
    for row, target, counted in zip(tokens.tolist(), targets.tolist(), counts.tolist(), strict=True):
        told = [(row[at], row[at + 1]) for at in range(0, 2 * RULES.pairs, 2)]
        values = dict(told)
        assert len(values) == len({*values.values()}) == RULES.pairs, "a key or a value is there twice"
        asked = [row[at] for at, here in enumerate(counted) if here]
        assert sorted(asked) == sorted(values), "each key is asked for once"
        assert all(at >= 2 * RULES.pairs for at, here in enumerate(counted) if here)
        assert [target[at] for at, here in enumerate(counted) if here] == [values[key] for key in asked]
        assert set(values) <= {*keys_of(RULES.vocabulary)}
        assert not set(values.values()) & {*keys_of(RULES.vocabulary)}


def check(data):
    check_answers(data.train)
    check_answers(data.test)
    check_no_leak(data)


def check_no_leak(data):
    def sets(part):
        told = windows_of(part)[:, : 2 * RULES.pairs].reshape(-1, RULES.pairs, 2)
        return {frozenset(map(tuple, row)) for row in told.tolist()}

    train, test = sets(data.train), sets(data.test)
    assert (len(train), len(test)) == (RULES.train, RULES.test), "a set of pairs is there twice"
    assert not train & test, "windows of train and of test have the same pairs"


def test_queries_have_one_answer_and_no_pairs_are_in_both_parts(data):
    assert (len(windows_of(data.train)), len(windows_of(data.test))) == (RULES.train, RULES.test)
    check(data)
    assert (generate(RULES).train == data.train).all(), "the same at every call"


def another_value(data):
    data.test[1] = data.test[3]


def a_window_of_train(data):
    data.test[: RULES.length] = data.train[RULES.length : 2 * RULES.length]


@pytest.mark.parametrize(
    ("plant", "words"), [(another_value, "is there twice"), (a_window_of_train, "train and of test have the same")]
)
def test_a_planted_error_is_seen(plant, words):
    data = generate(RULES)
    plant(data)
    with pytest.raises(AssertionError, match=words):
        check(data)


def test_without_enough_different_windows_there_are_none():
    with pytest.raises(ValueError, match="not 40 different sets of 1 pairs"):
        generate(RecallRules(length=4, pairs=1, vocabulary=10, train=30, test=10))
    for wrong in ({"pairs": 8}, {"vocabulary": 15}, {"length": 11}, {"test": 0}):
        with pytest.raises(ValueError, match="must"):
            RecallRules(**{**RULES.__dict__, **wrong})


def test_queries_come_soon_but_anywhere():
    """The first place has the weight 1, the last 1 / places^0.99."""
    rows = keys_values.draw(RecallRules(400, 1, 16, 1, 1), 4000, np.random.default_rng(0))
    place = (np.argmax(rows[:, 2:] > 0, axis=1)) // 2
    share = np.bincount(place, minlength=199) / 4000
    expected = np.arange(1, 200) ** -0.99
    expected /= expected.sum()
    assert np.abs(share - expected).max() < 5 * np.sqrt(0.17 * 0.83 / 4000)


def model_of(method, **options):
    op, own = METHODS[method]
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig("d32x2", 12, op=op, options={**own, **options}, vocabulary=16)).double()
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


@pytest.mark.parametrize("method", METHODS)
def test_a_token_depends_on_nothing_behind_it_and_every_parameter_is_trained(method):
    model = model_of(method, shift=True)
    tokens = torch.arange(24).reshape(2, 12) * 7 % 16
    changed = tokens.clone()
    changed[:, 5:] += 1
    changed %= 16
    whole = model(tokens)
    assert torch.equal(model(changed)[:, :5], whole[:, :5])
    earlier = tokens.clone()
    earlier[:, 0] = (earlier[:, 0] + 1) % 16
    assert torch.allclose(model(earlier)[:, 5:], whole[:, 5:]) == (method == FLOOR)
    whole.square().sum().backward()
    if method not in (FLOOR, "average"):
        still = {name for name, x in model.named_parameters() if x.grad is None or not x.grad.any()}
        assert still <= {f"blocks.{n}.attention.k_proj.projection.bias" for n in range(2)}, "which softmax does not see"


def test_gates_start_as_their_papers_say():
    decay = model_of("decay_tokens").blocks[0].attention.gates["log_decay"].proj
    assert torch.allclose(decay.bias.sigmoid(), torch.tensor(1 - 2.0**-5, dtype=torch.float64))
    slope = model_of("ssmax").blocks[0].attention.learned["slope"]
    assert torch.allclose(slope.detach() * torch.arange(1, 13).log().mean(), torch.ones(1, dtype=torch.float64))
    assert not model_of("sink").blocks[0].attention.learned["sink"].any()


def test_windows_of_a_shift_are_not_cut_over_processes():
    config = LanguageConfig("d32x2", 12, options={"shift": True})
    with pytest.raises(ValueError, match="context=2: a layer with shift needs the tokens of other processes"):
        require_parts(config, 2)
    require_parts(LanguageConfig("d32x2", 12), 2)
