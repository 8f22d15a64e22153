"""attnkit's ops in place of torch's own attention: the function, models that call it, and modules.

>>> from attnkit.integrations.torch import replace_sdpa
>>> with replace_sdpa("relu"):
...     out = model(x)
"""

from attnkit.integrations.torch.multihead import MultiheadAttention
from attnkit.integrations.torch.sdpa import replace_sdpa, scaled_dot_product_attention, set_sdpa
from attnkit.integrations.torch.swap import Swapped, swap

__all__ = ["MultiheadAttention", "Swapped", "replace_sdpa", "scaled_dot_product_attention", "set_sdpa", "swap"]
