"""Encoded images: the parts to decode, and the decoding processes.

Nothing here imports torch or the rest of the experiments: a decoding process starts in a fraction of a second with only
NumPy and Pillow.
"""
