"""What every layer of attnkit.nn does: state, gradients, half types, devices, padding, torch.compile."""

from functools import partial

import pytest
import torch

from attnkit.nn import MultiHeadAttention

from .arrays import LAYER, assert_close
from .layers import HEADS, LAYERS, PROJECTED, UNITS, called, every_parameter_learns, growth_of, tokens_of


@pytest.mark.parametrize("name", LAYERS)
def test_state_gradients_and_repr(name):
    one, two, x = LAYERS[name]().double(), LAYERS[name]().double(), tokens_of(name)
    two.load_state_dict(one.state_dict())
    out = called(two, x)
    assert torch.equal(out, called(one, x))
    every_parameter_learns(two, out)
    assert one.extra_repr()
    assert one.extra_repr() in repr(one)


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_autocast_and_dtype(name):
    layer, x = LAYERS[name](), tokens_of(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = called(layer, x)
    assert out.dtype == torch.bfloat16
    every_parameter_learns(layer, out)
    half = LAYERS[name](dtype=torch.float16)
    assert {x.dtype for x in half.state_dict().values()} == {torch.float16}
    assert called(half, x.half()).dtype == torch.float16


@pytest.mark.parametrize("name", LAYERS)
def test_device_reaches_what_is_made(name):
    assert {x.device.type for x in LAYERS[name](device="meta").state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", PROJECTED)
def test_projections_without_biases(name):
    layer = LAYERS[name](qkv_bias=False, out_bias=False)
    assert not [name for name in layer.state_dict() if name.endswith("proj.bias")]


@pytest.mark.parametrize("name", [*PROJECTED, *UNITS])
def test_padding_does_not_reach_the_tokens(name):
    layer, x = LAYERS[name]().double(), tokens_of(name)
    present = torch.rand(x.shape[:2]) < 0.7
    results = []
    for content in (0.0, 3.0, float("nan")):
        layer.zero_grad()
        out = called(layer, torch.where(present[..., None], x, content), present)
        assert torch.equal(out, results[0][0] if results else out)
        if content != content and name in HEADS:
            continue  # a projection of NaN has a gradient of NaN: MultiHeadAttention leaves padding in x
        every_parameter_learns(layer, out)
        results.append((out, *(p.grad.clone() for p in layer.parameters())))
    for grads in results[1:]:
        for one, other in zip(results[0], grads, strict=True):
            assert_close(other, one, LAYER)
    bias = layer.out_proj.bias if name in PROJECTED else torch.zeros(8, dtype=out.dtype)
    assert_close(out[~present], bias.expand(int((~present).sum()), 8), LAYER)


@pytest.mark.parametrize("name", [*HEADS, "soft", "soft ridge"])
def test_the_amount_of_padding_changes_nothing(name):
    layer, x = LAYERS[name]().double(), tokens_of(name)[:, :14]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 5), value=float("nan"))
    present = torch.arange(19).expand(2, 19) < 14
    assert_close(called(layer, padded, present)[:, :14], called(layer, x), growth_of(layer, x))


DROPPING = {
    "heads": partial(MultiHeadAttention, 8, 2, op="pointwise_attention", dropout=0.5),
    "slots": partial(HEADS["linformer_attention"], dropout=0.5),
    "unit": partial(UNITS["unit hua"], dropout=0.5),
}


@pytest.mark.parametrize("layer", DROPPING.values(), ids=DROPPING)
def test_dropout_only_in_training_and_from_torchs_generator(layer):
    layer, x = layer().double(), torch.randn(2, 19, 8, dtype=torch.float64)
    torch.manual_seed(1)
    one, two = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(one, layer(x))
    assert not torch.equal(one, two)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert layer.train().to("meta")(x.to("meta")).device.type == "meta"  # the seed lies where x does


REFEREE = pytest.mark.referee


@pytest.mark.parametrize(
    "name", ["lsh", pytest.param("soft", marks=REFEREE), "memory softmax", "unit causal", "soft convolution"]
)
def test_torch_compile_in_one_graph(name):
    layer, x = LAYERS[name](), tokens_of(name, torch.float32)
    compiled = torch.compile(lambda y: called(layer, y), fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), called(layer, x), LAYER)
