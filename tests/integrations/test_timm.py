"""swap_attention on modules of timm's interface, written here: timm needs torchvision."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, softmax

import attnkit
import attnkit_reference as reference
from attnkit.integrations.timm import swap_attention
from attnkit.nn import capture
from tests.library.arrays import LAYER, assert_close


class Attention(nn.Module):
    """The interface: softmax written out."""

    def __init__(self, dim: int = 16, num_heads: int = 2, qk_norm: bool = False, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale, self.fused_attn = self.head_dim**-0.5, False
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = (nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity() for _ in range(2))
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(attn_drop), nn.Linear(dim, dim), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (self.q_norm(q) * self.scale) @ self.k_norm(k).transpose(-2, -1)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        weights = dropout(softmax(scores, -1), self.attn_drop.p, self.training)
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).reshape(b, n, c)))


class Model(nn.Module):
    def __init__(self, attention: type[Attention] = Attention, **given) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": attention(**given)}) for _ in range(2))
        for p in self.parameters():
            nn.init.normal_(p, std=0.25)
        self.double().eval()

    def forward(self, x: Tensor, **given) -> Tensor:
        for block in self.blocks:
            x = x + block["attn"](x, **given)
        return x


BLOCKS = 2
NAMES = ("blocks.0.attn", "blocks.1.attn")


def tokens() -> Tensor:
    return torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_softmax_is_what_stood_there(qk_norm):
    """Outputs and gradients of inputs, with a mask too; the parameters are the same objects under the same names."""
    original = Model(qk_norm=qk_norm)
    swapped, mask = copy.deepcopy(original), torch.ones(5, 5, dtype=torch.bool).tril()
    before = dict(swapped.named_parameters())
    assert swap_attention(swapped, attnkit.softmax_attention) == NAMES
    after = dict(swapped.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    for given in ({}, {"attn_mask": mask}):
        x, y = tokens().requires_grad_(), tokens().requires_grad_()
        out, golden = swapped(x, **given), original(y, **given)
        assert_close(out, golden, BLOCKS * LAYER)
        out.square().sum().backward()
        golden.square().sum().backward()
        assert_close(x.grad, y.grad, 2 * BLOCKS * LAYER)  # there and back
    swapped.load_state_dict(original.state_dict())


def test_relu_is_the_references():
    model, x = Model(qk_norm=True), tokens()
    for block in model.blocks:
        block["attn"].scale = 0.7
    swap_attention(model, attnkit.pointwise_attention, activation="relu", alpha=0.5)
    layer = model.blocks[0]["attn"]
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
    given = (layer.q_norm(q), layer.k_norm(k), v)
    golden = reference.pointwise_attention(*(y.detach().numpy() for y in given), alpha=0.5, scale=0.7)
    expected = layer.proj(torch.from_numpy(golden).transpose(1, 2).flatten(2))
    assert_close(layer(x), expected, LAYER)
    with torch.no_grad(), capture(model) as record:
        model(x)
    assert [(found.name, found.rows) for found in record.layers] == [(name, 2 * 2 * 5) for name in NAMES]


def test_dropout_and_mode_are_kept():
    model = Model(attn_drop=0.5).train()
    swap_attention(model, attnkit.reluformer_attention)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(model(tokens()))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
    with pytest.raises(NotImplementedError, match="swap_attention: linear_attention takes no dropout; blocks"):
        swap_attention(Model(attn_drop=0.5), attnkit.linear_attention)


class Relative(Attention):
    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(3))


class Gated(Attention):
    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.gate = nn.Linear(16, 16)


class Rotary(Attention):
    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Channels(Attention):
    """Attends among the features of heads, as DaViT's."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 4, 1).unbind(0)
        weights = softmax(q @ k.transpose(-2, -1) * n**-0.5, -1)
        return self.proj((weights @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class Pictures(Attention):
    """Takes (B, H, W, C), as VOLO's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


@pytest.mark.parametrize(
    ("attention", "text"),
    [
        (Relative, r"blocks.0.attn has parameters that are not known: relative_position_bias_table"),
        (Gated, r"blocks.0.attn has parts that are not known: gate"),
        (Rotary, r"blocks.0.attn has arguments that are not known: rope"),
        (Channels, r"blocks.0.attn does not compute softmax attention among tokens"),
        (Pictures, r"blocks.0.attn cannot be called with tokens \(B, N, C\): "),
    ],
)
def test_what_is_not_known_is_refused_and_nothing_is_changed(attention, text):
    model = Model(attention)
    with pytest.raises(ValueError, match=text):
        swap_attention(model, attnkit.softmax_attention)
    assert all(type(block["attn"]) is attention for block in model.blocks)


def test_errors():
    with pytest.raises(ValueError, match="expected a model that holds modules with qkv, proj, num_heads"):
        swap_attention(nn.Linear(2, 2), attnkit.softmax_attention)
    with pytest.raises(ValueError, match="expected a model that holds modules"):
        swap_attention(Attention(), attnkit.softmax_attention)
    with pytest.raises(ValueError, match=r"swap_attention: op must be one of .*; got 'rela_attention'"):
        swap_attention(Model(), attnkit.rela_attention)
    with pytest.raises(ValueError, match=r"swap_attention: softmax_attention takes the options .*; got 'mask'"):
        swap_attention(Model(), attnkit.softmax_attention, mask=None)
    model = Model()
    model.blocks[0]["attn"].scale = 1.0
    with pytest.raises(NotImplementedError, match=r"swap_attention: linear_attention has no scores .* got 1.0"):
        swap_attention(model, attnkit.linear_attention)
    swap_attention(model, attnkit.softmax_attention)
    with pytest.raises(TypeError, match=r"SwappedAttention: attn_mask has dtype torch.int64; expected torch.bool or"):
        model(tokens(), attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    model = Model()
    swap_attention(model, "linear")
    with pytest.raises(NotImplementedError, match=r"SwappedAttention: linear_attention takes no bias.* other than 0"):
        model(tokens(), attn_mask=torch.ones(1, 5, dtype=torch.float64))


def test_float_masks_are_added_and_hide():
    """As torch's function takes them; a hidden key counts in no length."""
    softmax, relu, x = Model(), Model(), tokens()
    swap_attention(softmax, "softmax")
    swap_attention(relu, "relu")
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    added = torch.randn(2, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layer, attention = Model().blocks[0]["attn"], softmax.blocks[0]["attn"]
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
    for mask in (added, added.masked_fill(~seen, -torch.inf)):
        heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert_close(attention(x, attn_mask=mask), layer.proj(heads.transpose(1, 2).flatten(2)), LAYER)
    hides = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    assert_close(relu(x, attn_mask=hides), relu(x, attn_mask=seen), BLOCKS * LAYER)


class WideNorm(nn.LayerNorm):
    """In the dtype of its weight, as autocast computes norms on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def test_norms_of_queries_and_keys_under_autocast():
    """They may give float32 where values are bfloat16."""
    model, x = Model(qk_norm=True).float(), tokens().float()
    for block in model.blocks:
        block["attn"].q_norm = block["attn"].k_norm = WideNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        swap_attention(model, "softmax")
        found = model(x)
    assert found.dtype == expected.dtype
    assert (found - expected).norm() <= 0.03 * expected.norm()


def test_modules_are_recognised_under_another_default_device():
    """What tests them runs on the CPU, and what they allocate too."""
    model = Model()
    with torch.device("meta"):
        assert swap_attention(model, "relu") == NAMES
