"""Training studies of attention variants on torch: ``python -m experiments list | run | report``."""
