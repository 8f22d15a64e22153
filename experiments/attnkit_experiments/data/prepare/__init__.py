"""Downloaded archives, checked, counted and written in the form that the experiments read.

`PREPARE[name](archive, out)` writes `SPLIT.LANGUAGE.gz` of sentence pairs, read by `data.text.pairs.load_pairs`, or
shards of images (`imagenet`), or tokens of text, and `manifest.json` (what was read, kept and left out, with checksums)
into `out`. Nothing is downloaded. A count that differs from the known one is an error that shows both; `expected=None`
accepts the archive, and the manifest records that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnkit_experiments.data.prepare import corpus, europarl7, imagenet, iwslt14, wmt14

__all__ = ["IMAGES", "PREPARE", "TEXT"]

PREPARE: dict[str, Callable[..., dict[str, Any]]] = {
    "iwslt14": iwslt14.prepare,
    "wmt14": wmt14.prepare,
    "europarl7": europarl7.prepare,
    "imagenet-shards": imagenet.prepare,
    "imagenet21k": imagenet.prepare_21k,
    "text": corpus.prepare,
}
TEXT = "text"
IMAGES = ("imagenet-shards", "imagenet21k")
"""Those that take `terms`, what may be left out, as TEXT does."""
