"""Shared by all tests: one thread per worker, so that timings of the suite and bitwise tests do not depend on cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA compiles for hundreds of tests: in half of the time. That what it makes by itself conforms is a test of its own.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
