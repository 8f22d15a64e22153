"""What decoding keeps of the tokens seen so far: keys and values, or the state of a recurrence."""

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of the tokens seen so far, for decoding: made by `MultiHeadAttention.new_cache`.

    `length` of `max_length` tokens are filled. A key mask passed with the tokens is stored with them. Stored tensors
    are detached, so there are no gradients. `gates` (B, num_heads, max_length) are those of `forgetting_attention`.
    """

    def __init__(self, keys: Tensor, values: Tensor, gates: Tensor | None = None) -> None:
        self.keys, self.values, self.gates = keys, values, gates
        self.mask: Tensor | None = None
        self.length = 0

    @property
    def batch_size(self) -> int:
        return self.keys.shape[0]

    @property
    def max_length(self) -> int:
        return self.keys.shape[-2]

    def append(self, k: Tensor, v: Tensor, key_mask: Tensor | None, gates: Tensor | None = None) -> None:
        """Store k and v (B, H, T, ·), and gates (B, H, T), after the stored tokens."""
        stop = self.length + k.shape[-2]
        if stop > self.max_length:
            raise ValueError(f"KeyValueCache: {stop} tokens do not fit; made for max_length={self.max_length}")
        if k.shape[0] != self.batch_size:
            raise ValueError(f"KeyValueCache: batch of {k.shape[0]}; made for batch_size={self.batch_size}")
        self.keys[:, :, self.length : stop] = k.detach()
        self.values[:, :, self.length : stop] = v.detach()
        if gates is not None and self.gates is not None:
            self.gates[:, :, self.length : stop] = gates.detach()
        if key_mask is not None:
            if self.mask is None:
                self.mask = torch.ones(k.shape[0], self.max_length, dtype=torch.bool, device=k.device)
            self.mask[:, self.length : stop] = key_mask
        self.length = stop

    def reorder(self, indices: Tensor) -> None:
        """Reorder the batch: item n becomes the former item indices[n]. Items may repeat or be dropped.

        indices: integers (n,). For beam search.
        """
        if indices.ndim != 1:
            raise ValueError(f"KeyValueCache: indices must have one axis; got shape {tuple(indices.shape)}")
        self.keys, self.values = (x.index_select(0, indices) for x in (self.keys, self.values))
        self.mask = None if self.mask is None else self.mask.index_select(0, indices)
        self.gates = None if self.gates is None else self.gates.index_select(0, indices)

    def filled(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(k, v, key_mask) of all stored tokens; no mask if none was ever passed."""
        mask = None if self.mask is None else self.mask[:, : self.length]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length], mask

    def filled_gates(self) -> dict[str, Tensor]:
        """{"log_forget": that (B, H, T) of all stored tokens}, empty for ops that have no gates."""
        return {} if self.gates is None else {"log_forget": self.gates[:, :, : self.length]}


class StateCache:
    """The state of a recurrence after the tokens seen so far, for decoding: made by `MultiHeadAttention.new_cache`.

    `length` tokens are in it; its size does not depend on them. `state` is that of the op, None before the first token;
    it is detached, so there are no gradients. Tokens that a key mask hides are not in it.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.length = batch_size, 0
        self.state: tuple[Tensor, ...] | None = None

    def require(self, batch_size: int) -> None:
        """ValueError if the next tokens are those of another batch."""
        if batch_size != self.batch_size:
            raise ValueError(f"StateCache: batch of {batch_size}; made for batch_size={self.batch_size}")

    def keep(self, state: tuple[Tensor, ...], tokens: int) -> None:
        """The state after `tokens` more."""
        self.state = tuple(x.detach() for x in state)
        self.length += tokens

    def reorder(self, indices: Tensor) -> None:
        """Reorder the batch: item n becomes the former item indices[n]. Items may repeat or be dropped.

        indices: integers (n,). For beam search.
        """
        if indices.ndim != 1:
            raise ValueError(f"StateCache: indices must have one axis; got shape {tuple(indices.shape)}")
        self.batch_size = len(indices)
        if self.state is not None:
            self.state = tuple(x.index_select(0, indices) for x in self.state)
