"""Image classification with vision transformers."""
