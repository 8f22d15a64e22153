"""A mode of tests: memory holds NaN before it is written, so that what a kernel leaves out is seen.

The environment variable ATTNKIT_POISON turns it on. The CPU library asks for it too, for its working memory.
"""

import os
from functools import cache


@cache
def poisons() -> bool:
    """Whether outputs are filled before the call: NaN in every float, -1 in integers."""
    return "ATTNKIT_POISON" in os.environ
