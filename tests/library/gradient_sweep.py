"""Finite differences of every case of `gradient_cases`, in JAX and entry by entry in torch: ten minutes.

    python -m tests.library.gradient_sweep [PART OF AN ID ...]

Exit status 1 where a derivative is wrong.
"""

import sys
import traceback
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import torch
from jax.test_util import check_grads
from torch.autograd import gradcheck, gradgradcheck

from attnkit.backends.jax import blocked

from .gradient_cases import CASES, Case
from .test_gradchecks import SMALL_BLOCKS, in_jax, in_torch, kernels


def every_entry(case: Case) -> None:
    function, leaves = in_torch(case)
    gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, check_undefined_grad=False)


def checks(case: Case) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is asked of a case, by name."""
    yield "torch", lambda: every_entry(case)
    yield "jax", lambda: check_grads(*in_jax(case), order=2, modes=("fwd", "rev"))
    if "blocked" in kernels(case, jnp.asarray):
        yield "jax blocked", lambda: check_grads(*in_jax(case, "blocked"), order=2, modes=("rev",))


def main(parts_of_ids: list[str]) -> int:
    """Print a line per check."""
    torch.manual_seed(0)
    for name, value in SMALL_BLOCKS.items():
        setattr(blocked, name, value)
    wrong = 0
    for case in CASES:
        if parts_of_ids and not any(part in case.id for part in parts_of_ids):
            continue
        with jax.enable_x64(True):
            for name, check in checks(case):
                try:
                    check()
                    told = "ok"
                except Exception:
                    wrong, told = wrong + 1, f"wrong\n{traceback.format_exc(limit=0)}"
                print(f"{case.id} {name}: {told}", flush=True)
        jax.clear_caches()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
