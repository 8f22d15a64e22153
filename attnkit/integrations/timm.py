"""attnkit's ops in vision transformers of timm: their attention modules compute an op with the weights that they have.

>>> from attnkit.integrations.timm import swap_attention
>>> swap_attention(model, "relu")
('blocks.0.attn', 'blocks.1.attn')

Modules are recognised by the interface of `timm.models.vision_transformer.Attention`, not by class, so timm is not
imported. Those with more than it (rotary embeddings, relative positions, windows, gates) keep their own forward pass,
and what they pass to `scaled_dot_product_attention` the op computes.
"""

from attnkit.integrations.torch.vit import SwappedAttention, swap_attention

__all__ = ["SwappedAttention", "swap_attention"]
