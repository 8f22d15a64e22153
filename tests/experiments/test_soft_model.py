"""SOFT's image models: sizes and products against the paper's tables, shapes, options, and each method's attention."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import attnkit
from attnkit_conformance.model import tolerance
from attnkit_experiments.engine.counting import multiply_adds, parameters
from attnkit_experiments.soft.attention import Place, SoftOptions
from attnkit_experiments.soft.methods import METHODS, soft
from attnkit_experiments.soft.model import (
    NEWTON_PRODUCTS,
    OFFICIAL,
    OPTIONS,
    PAPER,
    SIZES,
    SoftConfig,
    SoftVisionTransformer,
    StochasticDepth,
)
from tests.library.arrays import LAYER, assert_agrees, assert_close, soft_growth

MILLIONS = {"tiny": 13, "small": 24, "medium": 45, "large": 64, "huge": 87}  # Table 3
BATCH = (2, 3, 32, 32)
STEPS = 4.0  # what the steps of Nyström's inverse make of an error, by the kit's rule; of the others nothing


def mini(**changes):
    return SoftConfig(
        **{"size": "mini", "image": 32, "channels": 3, "classes": 5, "landmarks": 4, "stem_stride": 2} | changes
    )


def published(**changes):
    return SoftConfig(**{"size": "tiny", "image": 224, "channels": 3, "classes": 1000} | changes)


def count(config):
    return parameters(lambda: SoftVisionTransformer(config))


def learn(config):
    """A model, its logits, and whether every parameter has a gradient."""
    torch.manual_seed(0)
    model = SoftVisionTransformer(config)
    logits = model(torch.randn(BATCH))
    logits.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        # softmax does not see what all keys have in common
        assert p.grad.abs().max() > 0 or name.endswith("k_proj.bias"), name
    assert logits.shape == (2, 5)
    return model


@pytest.mark.parametrize("size", MILLIONS)
def test_parameters_are_those_of_table_3(size):
    assert math.floor(count(published(size=size)) / 1e6) == MILLIONS[size]


def test_parameters_of_the_samplings_are_those_of_table_4b():
    for sampling, millions in {"convolution": 13.07, "random": 12.96, "biased": 12.96, "average_pool": 12.96}.items():
        options = dataclasses.replace(OFFICIAL, sampling=sampling)
        assert count(published(options=options)) / 1e6 == pytest.approx(millions, abs=0.005)


def test_the_codes_small_is_not_the_papers(monkeypatch):
    monkeypatch.setitem(SIZES, "small", SIZES["small"]._replace(depths=(1, 3, 20, 4)))
    assert round(count(published(size="small")) / 1e6) == 39


def test_multiply_adds_are_those_of_a_hand_count():
    """One stage of each kind; n, m, d and h as in the formulas of the paper's complexity."""
    options = dataclasses.replace(OFFICIAL, value_convs=(), sampling="biased", landmark_norm=False)
    config = mini(options=options)
    found = multiply_adds(lambda: SoftVisionTransformer(config), torch.empty(1, 3, 32, 32, device="meta"))
    widths, heads, depths = SIZES["mini"]
    stem = 16 * 16 * 9 * (3 * 8 + 8 * 8 + 8 * 16)
    total = stem + sum(
        (grid * grid) * 9 * before * width for grid, before, width in zip((8, 4, 2), widths, widths[1:], strict=False)
    )
    m = 4
    for grid, width, h, depth in zip((16, 8, 4), widths, heads, depths, strict=False):
        n = grid * grid
        # q, v, out and MLP; P, P v, P-transposed; A, X (P v); the means that are subtracted; Newton
        block = 11 * n * width**2 + 3 * n * m * width + 2 * m * m * width + m * width + h * NEWTON_PRODUCTS * m**3
        total += depth * block
    n, width = 5, widths[-1]
    total += 12 * n * width**2 + 2 * n * n * width + width * 5
    assert found == total


def test_newton_is_what_the_papers_count_leaves_out():
    """Table 4b: 1.9 G for average pooling."""
    config = published(options=dataclasses.replace(OFFICIAL, sampling="average_pool"))
    found = multiply_adds(lambda: SoftVisionTransformer(config), torch.empty(1, 3, 224, 224, device="meta"))
    assert round(found / 1e9, 1) == 2.1
    assert round((found - config.newton_multiply_adds) / 1e9, 1) == 1.9


def test_what_newton_takes_is_counted_in_the_stages_that_invert():
    """Landmarks are 4, and in the last stage of a pyramid the 3 × 3 tokens and the class token."""
    stages = NEWTON_PRODUCTS * 4**3 * (1 * 1 + 1 * 2 + 2 * 2)
    assert mini(image=48).newton_multiply_adds == stages
    assert mini(image=48, options=PAPER).newton_multiply_adds == stages + NEWTON_PRODUCTS * 10**3 * (1 * 3)
    assert mini(size="plain-mini").newton_multiply_adds == NEWTON_PRODUCTS * 4**3 * (4 * 2)
    assert mini(method="performer").newton_multiply_adds == 0


def test_the_norms_of_the_last_stage_and_behind_it_have_an_eps_of_their_own():
    norms = {name: x.eps for name, x in SoftVisionTransformer(mini()).named_modules() if isinstance(x, nn.LayerNorm)}
    of_last = {f"stages.3.blocks.0.{name}_norm" for name in ("attention", "mlp")}
    assert {name for name, eps in norms.items() if eps == 1e-6} == {*of_last, "norm"}


def test_every_stage_has_its_tokens():
    model = SoftVisionTransformer(mini())
    shapes = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    model(torch.randn(BATCH))
    assert shapes == [(256, 16), (64, 32), (16, 64), (5, 96)]
    grids = published().grids
    assert grids == (56, 28, 14, 7)
    assert [Place(32, 1, grid, 49, 0, PAPER).window() for grid in grids] == [8, 4, 2, 1]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "zeros"])  # of which attention learns nothing
def test_every_method_learns(method):
    model = learn(mini(method=method)).double()
    block = model.stages[0].blocks[0]
    x = torch.randn(2, 256, 16, dtype=torch.float64)
    weights, out = block.attention.weights(x, 16, 16), block.attention(x, 16, 16)
    inner = block.attention.attention
    if method == "linformer":
        assert weights.shape == (2, 1, 256, 4)
        return
    heads = weights @ inner.v_proj(x)[:, None]
    inner.value_conv = None
    growth = soft_growth(*inner.queries_and_landmarks(x, 16, 16), ridge=OFFICIAL.ridge) if method == "soft" else STEPS
    assert_close(inner.out_proj(heads[:, 0]), block.attention(x, 16, 16), growth * LAYER)
    assert (method == "soft") == bool((block.attention(x, 16, 16) - out).abs().max() > 1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": PAPER},
        {"options": dataclasses.replace(OFFICIAL, sampling="random")},
        {"options": dataclasses.replace(OFFICIAL, sampling="biased")},
        {"options": dataclasses.replace(OFFICIAL, sampling="average_pool"), "landmarks": 9},
        {"overlap": False},
        {"size": "plain-mini"},
        {"drop_path": 0.5},
        {"options": PAPER, "drop_path": 0.5},
    ],
)  # fmt: skip
def test_every_option_learns(changes):
    if changes.get("options") is PAPER and "drop_path" in changes:
        # whole branches are dropped: some parameters have no gradient in one step
        model = SoftVisionTransformer(mini(**changes))
        model(torch.randn(BATCH)).sum().backward()
        return
    learn(mini(**changes))


def test_landmarks_of_nystromformer_are_means_of_windows():
    torch.manual_seed(0)
    layer = METHODS["nystromformer"](Place(8, 2, 6, 9, 0, OFFICIAL))
    layer, x = layer.double(), torch.randn(1, 36, 8).double()
    q, k = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (layer.attention.q_proj, layer.attention.k_proj))
    q_marks, k_marks = (attnkit.landmarks.average_pool(y, 6, 6, 2) for y in (q, k))
    left, middle, right = ((a @ b.mT / 2).softmax(-1) for a, b in ((q, k_marks), (q_marks, k_marks), (q_marks, k)))
    layer.attention.options["inverse_steps"] = 40
    condition = torch.linalg.cond(middle).max().item()
    assert_close(layer.weights(x, 6, 6), left @ torch.linalg.inv(middle) @ right, condition)


def test_the_soft_layer_of_the_last_stage_is_the_whole_gaussian():
    """A sampling ratio of 1 makes S A-inverse S of equation 9 the matrix S itself."""
    torch.manual_seed(0)
    model = SoftVisionTransformer(mini(options=PAPER)).double()
    layer, x = model.stages[-1].blocks[0].attention, 6 * torch.randn(1, 5, 96).double()
    q, v = (p(x).unflatten(-1, (3, 32)).transpose(1, 2) for p in (layer.attention.q_proj, layer.attention.v_proj))
    expected = attnkit.gaussian_attention(q, q, v).transpose(1, 2).flatten(2)
    assert_close(layer(x, 2, 2), layer.attention.out_proj(expected), LAYER * soft_growth(q, q))
    # tokens far from each other make A the identity, on which Algorithm 2 as printed falls to 0
    assert not layer(20 * x, 2, 2).any()


def test_residuals_are_those_of_the_matrix_that_is_inverted():
    torch.manual_seed(0)
    options = SoftOptions(ridge=0.5, value_convs=())
    layer, x = soft(Place(8, 2, 6, 9, 0, options)), torch.randn(1, 36, 8)
    found = layer.residuals(x, 6, 6)
    assert found.shape == (1, 2, 21)
    _, landmarks = layer.attention.queries_and_landmarks(x, 6, 6)
    a = torch.exp(-torch.cdist(landmarks, landmarks).square() / (2 * 4**0.5)).double() + 0.5 * torch.eye(9).double()
    start = 0.9 * 2 / a.sum(-1).amax(-1)[..., None, None] ** 2 * a
    first = torch.linalg.matrix_norm(a @ start @ a - a, 2) / torch.linalg.matrix_norm(a, 2)
    condition = torch.linalg.cond(a).max().item()
    assert_agrees(found[..., 0], first, condition)
    left = tolerance.BOUND["float32"] * tolerance.eps("float32") * condition
    assert found[..., 20].max() < left < found[..., 0].min()


def test_stochastic_depth_keeps_the_mean_and_drops_whole_items():
    torch.manual_seed(0)
    layer, x = StochasticDepth(0.25), torch.ones(4000, 2, 3)
    out = layer(x)
    assert_agrees(out.unique(), [0, 4 / 3])
    assert (out == out[:, :1, :1]).all()
    assert out.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(layer.eval()(x), x)
    rates = [b.drop.p for s in list(SoftVisionTransformer(mini(drop_path=0.4)).stages)[:3] for b in s.blocks]
    assert_close(rates, [0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size": "tinny"}, "did you mean 'tiny'"),
        ({"method": "softt"}, "did you mean 'soft'"),
        ({"image": 36}, "images of 36 pixels do not fit the strides of the stages, 16 in all"),
        ({"stem_stride": 3}, "stem_stride must be 1, 2 or 4, got 3"),
        ({"method": "performer", "options": PAPER}, "softmax_last=False is for the method soft, got performer"),
        ({"overlap": False, "stem_stride": 1, "image": 16}, "overlap=False needs a stem_stride of 2 or 4"),
        ({"drop_path": 1.0}, r"drop_path must lie in \[0, 1\), got 1.0"),
    ],
)
def test_errors(changes, text):
    with pytest.raises(Exception, match=text):
        mini(**changes)


def test_landmarks_that_fit_no_windows_are_refused():
    with pytest.raises(ValueError, match="landmarks must be a square number that divides 16², got 9"):
        SoftVisionTransformer(mini(landmarks=9))
    assert set(OPTIONS) == {"official", "paper"}
