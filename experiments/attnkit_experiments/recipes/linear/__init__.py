"""*Transformers are RNNs* (a text of 2025 on attention without softmax, after Su 2020), which has no experiments."""

from attnkit_experiments.recipes.linear import copying, decoding, future, keeping, sequences

FILES = (sequences, decoding, copying, keeping, future)
