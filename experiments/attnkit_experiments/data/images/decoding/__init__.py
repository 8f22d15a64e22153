"""Encoded pictures: where their bytes lie, which part of them is wanted, and the processes that decode them.

Nothing here loads torch or the rest of the experiments: a decoding process starts in a fraction of a second and holds
NumPy and Pillow only.
"""
