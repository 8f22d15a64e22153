"""Translation with encoder-decoder Transformers."""
