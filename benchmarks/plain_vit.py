"""A vision transformer and its training as one would write them in an afternoon, with torch alone: what a step of
`experiments` is compared with. Pre-LN blocks, softmax by torch's SDPA, qk-layernorm, AdamW, shifted and flipped images.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PADDING = 4  # pixels by which an image is shifted at most


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads, bias=False) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int, depth: int, hidden: int, heads: int, patch: int, side: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def augmented(images: Tensor) -> Tensor:
    """Bytes (B, H, W, 3) as floats (B, 3, H, W) in -1 to 1, every image shifted and half of them flipped."""
    x = F.pad(images.permute(0, 3, 1, 2).float() / 127.5 - 1, (PADDING,) * 4)
    side = images.shape[1]
    rows, columns = torch.randint(2 * PADDING + 1, (2, len(x))).tolist()
    x = torch.stack([x[i, :, rows[i] : rows[i] + side, columns[i] : columns[i] + side] for i in range(len(x))])
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)


def training(model: ViT, images: Tensor, labels: Tensor, batch: int) -> Iterator[float]:
    """Train on, a step at a time, and yield the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    while True:
        ids = torch.randint(len(images), (batch,))
        loss = F.cross_entropy(model(augmented(images[ids])), labels[ids], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
