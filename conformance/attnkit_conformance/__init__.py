"""The referee of attention variants: cases, golden values, bounds and the judge; `python -m attnkit_conformance`."""

__version__ = "0.1.0"
