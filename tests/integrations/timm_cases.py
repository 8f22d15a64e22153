"""swap on models of timm itself; test_other_folders.py runs this file where timm can be imported."""

import copy
import functools
from types import ModuleType

import pytest
import torch
from torch import nn

from attnkit.integrations.torch import swap
from tests.integrations.counting import count
from tests.library.arrays import LAYER, assert_close

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Importing from timm"
)
SIZE = 64
BEIT = {"img_size": SIZE, "depth": 2, "embed_dim": 24, "num_heads": 2}
SWIN = {"img_size": SIZE, "depths": (2, 1), "embed_dim": 12, "num_heads": (2, 2), "window_size": 4}
SERVED = {
    "vit_tiny_patch16_224": (BEIT, 2),
    "beit_base_patch16_224": (BEIT, 2),  # a table of relative positions
    "eva02_tiny_patch14_224": (BEIT | {"img_size": 56}, 2),  # rotary embeddings
    "vit_small_patch16_dinov3": (BEIT, 2),
    "swin_tiny_patch4_window7_224": (SWIN, 3),  # windows, shifted, and relative positions
}


@functools.cache
def timm() -> ModuleType:
    """timm; torchvision, which it imports, refuses to beside a CPU build of torch unless its operators are declared."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        timm.library = library  # type: ignore[attr-defined]  # its declarations live as long as it
    import timm as package

    return package


def model(name: str, sizes: dict) -> nn.Module:
    torch.manual_seed(0)
    made = timm().create_model(name, num_classes=3, **sizes).double().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.parametrize("name", SERVED)
def test_softmax_is_what_stood_there_and_relu_is_not(name, monkeypatch):
    """Outputs and gradients; the parameters are the same objects, and a copy computes the op too."""
    sizes, layers = SERVED[name]
    original = model(name, sizes)
    swapped = copy.deepcopy(original)
    before = dict(swapped.named_parameters())
    x = torch.randn(2, 3, sizes["img_size"], sizes["img_size"], dtype=torch.float64)
    golden = original(x)
    calls = count(monkeypatch, "softmax_attention", "pointwise_attention")
    assert (len(swap(swapped, "softmax").swapped), swap(swapped, "softmax").unchanged) == (layers, {})
    calls.clear()  # swap itself asks for softmax where it compares a module with it
    out = swapped(x)
    assert calls == ["softmax_attention"] * layers
    assert_close(out, golden, LAYER * layers)
    out.square().sum().backward()
    golden.square().sum().backward()
    for parameter, other in zip(swapped.parameters(), original.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, LAYER * layers)
    assert all(parameter is before[key] for key, parameter in swapped.named_parameters())
    swapped.load_state_dict(original.state_dict())
    swap(swapped, "relu")
    calls.clear()
    relu = copy.deepcopy(swapped)(x)
    assert calls == ["pointwise_attention"] * layers
    assert float((relu - golden).abs().max().detach()) > 1e-3


def test_padded_batches_of_pictures_of_any_size():
    """NaFlexViT hides padding, as keys and as queries, by masks of floats: what is there is as without padding."""
    net = model("naflexvit_base_patch16_gap", {"embed_dim": 24, "depth": 2, "num_heads": 2})
    patches = torch.randn(2, 6, 16 * 16 * 3, dtype=torch.float64)
    coord = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1).reshape(1, 6, 2)
    there = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    coords = torch.where(there[..., None], coord, 0)
    padded = {"patches": patches, "patch_coord": coords, "patch_valid": there}
    alone = {"patches": patches[1:, :3], "patch_coord": coord[:, :3], "patch_valid": there[1:, :3]}
    golden = net(padded)
    assert swap(net, "softmax") == (("blocks.0.attn", "blocks.1.attn"), {})
    assert_close(net(padded), golden, 2 * LAYER)
    swap(net, "relu")
    assert_close(net(padded)[1:], net(alone), 2 * LAYER)
    assert float((net(padded) - golden).abs().max().detach()) > 1e-3


def test_what_attends_is_said_and_kept(tmp_path):
    """By modules that keep their own forward pass too; weights of one are refused by the other, and in a file."""
    from safetensors.torch import load_model, save_model

    from attnkit.nn import describe

    plain = model("eva02_tiny_patch14_224", SERVED["eva02_tiny_patch14_224"][0])
    assert {(row.attention.op, row.attention.impl) for row in describe(plain)} == {("softmax_attention", "sdpa")}
    swapped = copy.deepcopy(plain)
    swap(swapped, "relu", alpha=0.5)
    assert str(describe(swapped)).startswith(
        "blocks.0.attn: EvaAttention, pointwise_attention(activation='relu', alpha=0.5,"
    )
    save_model(swapped, tmp_path / "swapped.safetensors")
    with pytest.raises(RuntimeError, match=r"blocks.0.attn.attnkit_pointwise_attention"):
        load_model(plain, tmp_path / "swapped.safetensors")
    other = copy.deepcopy(plain)
    swap(other, "relu")
    for target in (other, copy.deepcopy(other)):
        with pytest.raises(RuntimeError, match=r"alpha=0.5.* but loaded into .*alpha=1.0.*: blocks.0.attn, blocks.1.a"):
            load_model(target, tmp_path / "swapped.safetensors")
    swap(other, "relu", alpha=0.5)
    load_model(other, tmp_path / "swapped.safetensors")
    plain.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("name", "reason"), [("volo_d1_224", "cannot be called with tokens"), ("cait_xxs24_224", "proj_l")]
)
def test_what_cannot_be_swapped_is_refused_before_the_first_forward(name, reason):
    with pytest.raises(ValueError, match=f"nothing to swap in a .*{reason}"):
        swap(timm().create_model(name, num_classes=3), "relu")


def test_an_op_without_a_bias_is_refused_where_positions_are_one():
    with pytest.raises(ValueError, match=r"linear_attention takes no bias; blocks.0.attn has relative_position_bias"):
        swap(model("beit_base_patch16_224", BEIT), "linear")
