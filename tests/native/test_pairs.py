"""Products of bfloat16 where blocks of queries begin within a tile of keys, and where tiles are not full.

The quick profile has no window on lengths that cross tiles.
"""

import pytest

from attnkit_conformance import core
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import selection
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes import rows

ROWS = [
    "tile.shape=33x257,window=left",
    "tile.shape=33x257,window=both,mask=keys",
    "tile.shape=33x257,window=left,causal=lower_right,width=17x5",
    "tile.shape=100x65,window=left",
]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", ["softmax_attention", "pointwise_attention", "sparsemax_attention"])
def test_windows_on_lengths_that_cross_tiles(library, op, row):
    (adapter,) = selection.find(["torch-native"])
    case = draw_case(rows.sample_named(BY_NAME[op], "bfloat16", row))
    result = core.check(adapter, case)
    assert result.status == "pass", result.message
