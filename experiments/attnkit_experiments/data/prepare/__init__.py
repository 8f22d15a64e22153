"""What a person has downloaded, checked, counted and written as the experiments read it.

`PREPARE[name](archive, out)` writes `SPLIT.LANGUAGE.gz` of sentence pairs, which `data.text.pairs.load_pairs`
reads, or shards of images (`imagenet`), and `manifest.json` (what was read, kept and left out, with checksums of pairs)
into `out`. Nothing is downloaded. A count that differs from
the known one is an error that says both; `expected=None` takes the archive as it is and the manifest records that.
"""

from __future__ import annotations

from attnkit_experiments.data.prepare import europarl7, imagenet, iwslt14, wmt14

__all__ = ["PREPARE"]

PREPARE = {
    "iwslt14": iwslt14.prepare,
    "wmt14": wmt14.prepare,
    "europarl7": europarl7.prepare,
    "imagenet-shards": imagenet.prepare,
}
