"""Shared by all tests: one thread per worker, so that timings of the suite and bitwise tests do not depend on cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
