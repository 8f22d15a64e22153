"""Sentence pairs out of the original archives that a person has downloaded: checked, counted, written as line files.

`PREPARE[name](archive, out)` writes `SPLIT.LANGUAGE.gz` and `manifest.json` (what was read, kept and left out, with
checksums) into `out`, which `experiments.data.pairs.load_pairs` reads. Nothing is downloaded. A count that differs from
the known one is an error that says both; `expected=None` takes the archive as it is and the manifest records that.
"""

from __future__ import annotations

from experiments.data.prepare import europarl7, iwslt14, wmt14

__all__ = ["PREPARE"]

PREPARE = {"iwslt14": iwslt14.prepare, "wmt14": wmt14.prepare, "europarl7": europarl7.prepare}
