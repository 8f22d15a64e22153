"""Numbers out of their range and unknown names are answered by name; the last number in the range is taken."""

import dataclasses
import math
import re

import numpy as np
import pytest

from attnkit_experiments.commands.runner import Request, choose
from attnkit_experiments.data.sequences.listops import ListOpsRules
from attnkit_experiments.data.sequences.lra import SequenceRequest
from attnkit_experiments.data.text.pairs import PairRequest
from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.sampler import ShuffledShards
from attnkit_experiments.images.task import AugmentConfig
from attnkit_experiments.recipes import MEASUREMENTS
from attnkit_experiments.sequences.model import ClassifierConfig
from attnkit_experiments.study.overrides import override
from attnkit_experiments.translation.decode import DecodeConfig
from attnkit_experiments.translation.model import TranslationConfig


def settle(recipe: str, setting: str) -> None:
    """What `run` does with a setting before it reads data."""
    if recipe in MEASUREMENTS:
        override(MEASUREMENTS[recipe].presets["smoke"].study, (setting,))
    else:
        choose(Request(recipe, "smoke", None, out=None, settings=(setting,)))


@pytest.mark.parametrize(
    ("recipe", "wrong", "message"),
    [
        ("000-fig1", "points=", "--set points: expected at least one model such as d64/4"),
        ("000-fig1", "points=d64/0", "--set points: expected size/patch such as d64/4, got 'd64/0'"),
        ("000-fig1", "points=d65/4", "unknown model size 'd65'; did you mean 'd64'?"),
        ("000-fig2", "alphas=", "000-fig2: alphas must have one or more numbers, got none"),
        ("000-fig2", "shots=3,0", "--set shots=3,0: shots must be at least 1, got 0"),
        ("000-fig3", "lr_factors=1,0", "000-fig3: lr_factors must be above 0, got 0"),
        ("000-learned", "kinds=alpha-hed", "unknown learned scale 'alpha-hed'; did you mean 'alpha-head'?"),
        ("000-lengths", "lengths=64,1", "000-lengths: lengths must be at least 2, got 1"),
        ("001-table4", "methods=", "--set methods: expected one or more of vanilla, "),
        ("001-table4", "methods=vanila", "unknown method 'vanila'; did you mean 'vanilla'?"),
        ("001-fig1", "memories=soft", "unknown memory 'soft'; did you mean 'softmax'?"),
        ("002-table1", "methods=sof", "unknown method 'sof'; did you mean 'soft'?"),
        ("002-table3", "sizes=giant", "unknown size 'giant'; known: tiny, small, "),
        ("002-table3", "options=mine", "unknown options 'mine'; "),
        ("002-fig1b", "methods=sof", "unknown method 'sof'; did you mean 'soft'?"),
        ("002-fig1b", "multiples=0", "--set multiples=0: multiples must be at least 1, got 0"),
        ("002-fig1b", "layers=0", "--set layers=0: layers must be at least 1, got 0"),
        ("002-halving", "spreads=", "--set spreads=: spreads must have one or more numbers, got none"),
        ("002-halving", "landmarks=0", "--set landmarks=0: landmarks must be at least 1, got 0"),
        ("002-halving", "most=-1", "--set most=-1: most must be at least 0, got -1"),
        ("002-table6", "hold_out=1", "--set hold_out=1: hold_out must be 0 or at least 2, got 1"),
        ("002-table6", "clip=-1", "--set clip=-1: clip must be at least 0, got -1"),
        ("003-copying", "exact_at=1", "--set exact_at=1: exact_at must be at least 2, got 1"),
        ("003-copying", "tested=-1", "--set tested=-1: tested must be at least 0, got -1"),
        ("003-copying", "methods=linera", "unknown method 'linera'; did you mean 'linear'?"),
        ("003-decoding", "heads=0", "--set heads=0: heads must be at least 1, got 0"),
        ("003-decoding", "head_dim=0", "--set head_dim=0: head_dim must be at least 1, got 0"),
        ("003-decoding", "tokens=0", "--set tokens=0: tokens must be at least 1, got 0"),
        ("003-decoding", "features=0", "--set features=0: features must be at least 1, got 0"),
        ("003-decoding", "lengths=", "--set lengths=: lengths must have one or more numbers, got none"),
    ],
)  # fmt: skip
def test_a_setting_of_a_recipe_out_of_range_is_named(recipe: str, wrong: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        settle(recipe, wrong)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [
        ("000-fig1", "points=d64/1"),
        ("000-fig2", "shots=1"),
        ("000-lengths", "lengths=2"),
        ("000-lengths", "lengths="),
        ("002-fig1b", "multiples=1"),
        ("002-fig1b", "layers=1"),
        ("002-halving", "landmarks=1"),
        ("002-halving", "most=0"),
        ("002-table6", "hold_out=2"),
        ("002-table6", "clip=0"),
        ("003-copying", "exact_at=2"),
        ("003-copying", "exact_at="),
        ("003-decoding", "heads=1"),
    ],
)
def test_the_last_number_in_the_range_is_taken(recipe: str, setting: str) -> None:
    settle(recipe, setting)


CONFIGURATIONS = (
    (TrainConfig(1), {"steps": 1, "accumulate": 0, "average": 1, "warmup": 0, "ema": 0}),
    (AugmentConfig(), {"mixup": 0, "cutmix": 0, "erase": 0, "smoothing": 0}),
    (ListOpsRules(), {"depth": 1, "arguments": 2}),
    (SequenceRequest("listops"), {"train": 0, "valid": 0, "test": 0}),
    (PairRequest(), {"max_length": 0, "document_tokens": 0, "train_pairs": 0, "valid_pairs": 0, "test_pairs": 0}),
    (ClassifierConfig(2, 1, 1), {"vocabulary": 2, "classes": 1, "length": 1, "width": 1, "hidden": 1, "depth": 0}),
    (DecodeConfig(), {"beam": 1, "a": 0, "b": 0}),
    (TranslationConfig(8), {"vocabulary": 1, "encoder_layers": 1, "decoder_layers": 1, "max_length": 1}),
)


@pytest.mark.parametrize(
    ("configuration", "name", "least"),
    [(one, name, least) for one, leasts in CONFIGURATIONS for name, least in leasts.items()],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_configuration_takes_the_least_and_no_less(configuration: object, name: str, least: int) -> None:
    assert getattr(dataclasses.replace(configuration, **{name: least}), name) == least
    with pytest.raises(ValueError, match=f"{name} must (be at least {least}|lie in \\[{least}, 1.?), got {least - 1}"):
        dataclasses.replace(configuration, **{name: least - 1})


@pytest.mark.parametrize(
    ("configuration", "change", "message"),
    [
        (TrainConfig(1), {"lr": 0}, "lr must be above 0, got 0"),
        (TrainConfig(1), {"clip": 0}, "clip must be above 0, got 0"),
        (TrainConfig(1), {"ema": 1.0}, "ema must lie in [0, 1), got 1"),
        (AugmentConfig(), {"erase": 1.5}, "erase must lie in [0, 1], got 1.5"),
        (AugmentConfig(), {"smoothing": 1.0}, "smoothing must lie in [0, 1), got 1"),
        (AugmentConfig(), {"smallest_crop": 0.0}, "smallest_crop must lie in (0, 1], got 0"),
        (ListOpsRules(), {"operator_share": 1.0}, "operator_share must lie in (0, 1), got 1"),
        (ListOpsRules(), {"operator_share": 0.0}, "operator_share must lie in (0, 1), got 0"),
    ],
)
def test_open_ends_do_not_belong_to_a_range(configuration: object, change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dataclasses.replace(configuration, **change)


def test_closed_ends_belong_to_a_range() -> None:
    AugmentConfig(erase=1.0, smallest_crop=1.0)
    require_in("[0, 1]", x=(0, 0.5, 1))


def test_a_range_without_an_upper_end_has_infinity_and_no_nan() -> None:
    assert TrainConfig(1, clip=math.inf).clip == math.inf
    with pytest.raises(ValueError, match=r"^clip must be above 0, got nan$"):
        TrainConfig(1, clip=math.nan)


def test_a_window_has_one_shard_at_least() -> None:
    ShuffledShards(np.zeros(3, np.int64), 1)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        ShuffledShards(np.zeros(3, np.int64), 0)
