"""KeyValueMemory, GatedAttentionUnit and SoftAttention2d: the ops that they are, options, masks."""

import pytest
import torch
from torch.nn.functional import layer_norm, relu

import attnkit
from attnkit.nn import GatedAttentionUnit, KeyValueMemory, SoftAttention2d, capture
from attnkit.nn.soft2d import _convolved, _even_means

from .arrays import LAYER, assert_close, soft_growth
from .layers import UNITS, every_parameter_learns


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_autocast_leaves_float64_as_in_a_linear_layer():
    memory, x = KeyValueMemory(8, 10).double(), torch.randn(2, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert memory(x).dtype == torch.nn.Linear(8, 10).double()(x).dtype == torch.float64


def test_autocast_does_not_round_means_of_overlapping_windows():
    layer, q = SoftAttention2d(8, 2, num_landmarks=4), torch.randn(1, 2, 300, 4, requires_grad=True)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            means = layer._landmarks(q, 15, 20, None, None)[0]
            found.append((means, *torch.autograd.grad(means.sin().sum(), q)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------ memory


def test_memory_is_a_feed_forward_network():
    layer, x = KeyValueMemory(8, 10).double(), randn(2, 5, 8)
    expected = relu(x @ layer.keys.T + layer.key_bias) @ layer.values + layer.value_bias
    assert_close(layer(x), expected, LAYER)
    assert_close(layer(x[0]), expected[0], LAYER)
    assert_close(layer(x[0, 0]), expected[0, 0], LAYER)
    assert layer.extra_repr() == "dim=8, num_slots=10, out_dim=8, activation='relu', bias=True, norm=False"


def test_softmax_memory_is_attention_to_slots_and_a_norm():
    layer, x = KeyValueMemory(8, 10, activation="softmax", norm=True, bias=False, eps=0.01).double(), randn(2, 5, 8)
    layer.norm_weight.data.uniform_(0.5, 2.0)
    layer.norm_bias.data.uniform_(-1.0, 1.0)
    heads = attnkit.softmax_attention(x, layer.keys, layer.values, scale=1.0)
    assert_close(layer(x), layer_norm(heads, (8,), layer.norm_weight, layer.norm_bias, 0.01), LAYER)


def test_slots_start_as_the_weights_of_linear_layers():
    layer = KeyValueMemory(16, 400)
    assert layer.keys.abs().max() <= 16**-0.5 < 1.05 * layer.keys.abs().max()
    assert layer.values.abs().max() <= 400**-0.5 < 1.05 * layer.values.abs().max()


def test_slots_are_seen_by_capture():
    layer = torch.nn.Sequential(KeyValueMemory(8, 10))
    with capture(layer) as record:
        layer(torch.randn(2, 5, 8))
    assert abs(record["0"].slot_anisotropy) < 1


# -------------------------------------------------------------------------------------------------------- unit


def arrays_of(layer):
    names = {"z": "w_z", "u": "w_u", "v": "w_v", "out": "w_o"}
    matrices = {w: getattr(layer, f"{name}_proj").weight.T for name, w in names.items()}
    return matrices | {name: getattr(layer, name) for name in ("gamma_q", "beta_q", "gamma_k", "beta_k")}


@pytest.mark.parametrize("name", UNITS)
def test_unit_is_the_op(name):
    layer, x = UNITS[name]().double(), randn(2, 6, 8)
    for parameter in (layer.gamma_q, layer.beta_q, layer.gamma_k, layer.beta_k):
        parameter.data.normal_()
    keys, present = (torch.rand(2, 6) < 0.6 for _ in range(2))
    masks = {"mask": torch.rand(2, 1, 6, 6) < 0.7, "bias": randn(1, 1, 6, 6)}
    options = {"alpha": layer.alpha, "length": layer.length, "causal": layer.causal}
    assert_close(layer(x), attnkit.gated_attention_unit(x, **arrays_of(layer), **options), LAYER)
    options |= {"mask": masks["mask"][:, 0] & keys[:, None, :], "query_mask": present, "bias": masks["bias"][:, 0]}
    padded = torch.where((keys | present)[..., None], x, float("nan"))
    found = layer(padded, key_mask=keys, query_mask=present, **masks)
    assert_close(found, attnkit.gated_attention_unit(padded, **arrays_of(layer), **options), LAYER)
    every_parameter_learns(layer, found)
    assert (found[~present] == 0).all()


def test_a_new_unit_gives_almost_nothing():
    layer = GatedAttentionUnit(8)
    assert layer(torch.randn(2, 6, 8)).abs().max() < 1e-3
    for gamma in (layer.gamma_q, layer.gamma_k):
        assert 0.016 < gamma.std() < 0.024


def test_the_units_text_and_implementation():
    assert GatedAttentionUnit(8).extra_repr() == "alpha=2.0, length='visible'"
    assert GatedAttentionUnit(8, causal=True).extra_repr().endswith(", causal=True")
    with pytest.raises(ValueError, match=r"pointwise_attention: impl .*'other'"):
        GatedAttentionUnit(8, impl="other")(torch.randn(2, 6, 8))


def test_the_unit_is_seen_by_capture():
    layer = torch.nn.Sequential(GatedAttentionUnit(8, qk_dim=4, causal=True))
    with capture(layer) as record:
        layer(torch.randn(2, 6, 8))
    assert record["0"].rows == 12


# -------------------------------------------------------------------------------------------------------- soft


def test_soft_is_the_op_between_projections():
    layer, x = SoftAttention2d(8, 2, stride=2, newton_steps=4, init_scale=0.8).double(), randn(2, 4, 5, 8)
    flat = x.flatten(1, 2)
    q, v = (proj(flat).unflatten(-1, (2, 4)).transpose(1, 2) for proj in (layer.q_proj, layer.v_proj))
    marks = attnkit.landmarks.average_pool(q, 4, 5, 2)
    heads = attnkit.soft_attention(q, v, marks, newton_steps=4, init_scale=0.8)
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    growth = LAYER * soft_growth(q, marks, newton_steps=4)
    assert_close(layer(flat, 4, 5), expected, growth)
    assert_close(layer(x), expected.unflatten(1, (4, 5)), growth)


def test_the_options_of_the_authors_code():
    """Their order of things: q is divided by d^¼ first, landmarks are made from that, distances count half."""
    options = {"sampling": "convolution", "stride": 2, "ridge": 0.01, "landmark_norm": True, "value_conv": 3}
    layer, x = SoftAttention2d(8, 2, **options).double(), randn(2, 4, 6, 8)
    torch.nn.init.normal_(layer.landmark_norm.bias)
    flat = x.flatten(1, 2)
    q, v = (proj(flat).unflatten(-1, (2, 4)).transpose(1, 2) for proj in (layer.q_proj, layer.v_proj))
    q = q / 4**0.25
    pictures = q.transpose(2, 3).reshape(4, 4, 4, 6)
    marks = torch.nn.functional.conv2d(pictures, layer.kernel, stride=2).flatten(2).transpose(1, 2)
    marks = torch.nn.functional.gelu(layer.landmark_norm(marks)).unflatten(0, (2, 2))
    a, p = (torch.exp(-torch.cdist(marks, other).square() / 2) for other in (marks, q))
    heads = p.mT @ attnkit.newton_inverse(a + 0.01 * torch.eye(6, dtype=a.dtype)) @ p @ v
    # heads are the channels, features of a head the batch
    pictures = v.unflatten(2, (4, 6)).permute(0, 4, 1, 2, 3).flatten(0, 1)
    convolved = torch.nn.functional.conv2d(pictures, layer.value_conv.weight, padding=1, groups=2)
    heads = heads + convolved.unflatten(0, (2, 4)).permute(0, 2, 3, 4, 1).flatten(2, 3)
    growth = LAYER * soft_growth(q, marks, ridge=0.01)
    assert_close(layer(flat, 4, 6), layer.out_proj(heads.transpose(1, 2).flatten(2)), growth)
    assert layer.value_conv.weight.shape == (2, 1, 3, 3)
    kernel, bound = SoftAttention2d(32, 2, sampling="convolution", stride=2).kernel, 1 / (2 * 16**0.5)
    assert -bound <= kernel.min() < -0.8 * bound
    assert 0.8 * bound < kernel.max() <= bound


def test_the_convolution_of_values_reads_zeros_for_padding():
    layer, v = SoftAttention2d(8, 2, value_conv=3).double(), randn(2, 2, 20, 4)
    present = torch.rand(2, 20) < 0.7
    zeros = torch.where(present[:, None, :, None], v, 0.0)
    found, expected = (_convolved(layer.value_conv, x, 4, 5, mask) for x, mask in ((v, present), (zeros, None)))
    assert torch.equal(found[present], expected[present])
    assert not found[~present].any()


def test_random_landmarks_are_those_of_the_seed_or_given():
    layer, x = SoftAttention2d(8, 2, sampling="random", num_landmarks=4, seed=3).double(), randn(2, 20, 8)
    drawn = torch.from_numpy(attnkit.landmarks.random_indices(20, 4, 3))
    assert torch.equal(layer(x, 4, 5), layer(x, 4, 5, indices=drawn))
    assert not torch.allclose(layer(x, 4, 5), layer(x, 4, 5, indices=torch.arange(4)))
    of_windows = SoftAttention2d(8, 2, sampling="biased").double()
    assert of_windows.queries_and_landmarks(x, 4, 5)[1].shape == (2, 2, 4, 4)
    biased = SoftAttention2d(8, 2, sampling="biased", num_landmarks=4).double()
    assert SoftAttention2d(8, 2, sampling="biased", stride=1, num_landmarks=1)(x.float(), 4, 5).shape == x.shape
    biased.load_state_dict(dict(layer.state_dict()))  # without the record, which has the sampler
    assert torch.equal(biased(x, 4, 5), layer(x, 4, 5, indices=torch.arange(4)))


def test_any_square_number_of_landmarks_covers_the_picture():
    layer, x = SoftAttention2d(8, 2, num_landmarks=9).double(), randn(2, 20, 8)
    q, landmarks = layer.queries_and_landmarks(x, 4, 5)
    pooled = torch.nn.functional.adaptive_avg_pool2d(q.transpose(2, 3).unflatten(-1, (4, 5)).flatten(0, 1), 3)
    assert_close(landmarks, pooled.unflatten(0, (2, 2)).flatten(-2).mT, LAYER)
    whole = SoftAttention2d(8, 2, num_landmarks=4).double()
    whole.load_state_dict(layer.state_dict())
    growth = LAYER * soft_growth(*whole.queries_and_landmarks(x[:, :16], 4, 4))
    assert_close(whole(x[:, :16], 4, 4), _strided(whole)(x[:, :16], 4, 4), growth)


def test_means_of_half_types_are_taken_in_single_precision():
    q = torch.randn(2, 2, 20, 4, dtype=torch.bfloat16)
    assert torch.equal(_even_means(q, 4, 5, 2, None), _even_means(q.float(), 4, 5, 2, None).to(q.dtype))


def test_padding_is_in_no_mean():
    q, present = randn(2, 2, 16, 4), torch.rand(2, 1, 16) < 0.6
    found, expected = _even_means(q, 4, 4, 2, present), attnkit.landmarks.average_pool(q, 4, 4, 2, query_mask=present)
    assert_close(found[0], expected[0], LAYER)
    assert torch.equal(found[1].expand_as(expected[1]), expected[1])


def _strided(layer):
    other = SoftAttention2d(8, 2, stride=2).double()
    other.load_state_dict(layer.state_dict())
    return other


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: KeyValueMemory(8, 10, activation="gelu"), "activation must be 'relu' or 'softmax'; got 'gelu'"),
        (lambda: KeyValueMemory(8, 0), "dim and num_slots must be at least 1; got 8 and 0"),
        (lambda: GatedAttentionUnit(8, dropout=1.0), r"dropout must lie in \[0, 1\); got 1.0"),
        (lambda: SoftAttention2d(8, 3), "dim must be a multiple of num_heads; got 8 and 3"),
        (lambda: SoftAttention2d(8, 2, sampling="pool"), "sampling must be one of average_pool, .*; got 'pool'"),
        (lambda: SoftAttention2d(8, 2, stride=0), "stride and num_landmarks must be at least 1; got 0 and None"),
        (
            lambda: SoftAttention2d(8, 2, num_landmarks=8),
            "num_landmarks must be a square number for average_pool; got 8",
        ),
        (
            lambda: SoftAttention2d(8, 2, sampling="convolution", num_landmarks=4),
            "num_landmarks must be None for convolution; got 4",
        ),
        (
            lambda: SoftAttention2d(8, 2, num_landmarks=36)(torch.ones(2, 20, 8), 4, 5),
            "36 does not fit pictures of 4×5",
        ),
        (lambda: SoftAttention2d(8, 2, value_conv=4), "value_conv must be odd; got 4"),
        (lambda: SoftAttention2d(8, 2)(torch.ones(2, 20, 8), 4, 4), r"x must be \(B, height, width, dim\)"),
        (lambda: SoftAttention2d(8, 2)(torch.ones(2, 20, 8)), "height None and width None"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
