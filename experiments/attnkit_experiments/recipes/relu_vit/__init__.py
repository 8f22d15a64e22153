"""Wortsman et al. 2023, *Replacing softmax with ReLU in Vision Transformers*."""

from attnkit_experiments.recipes.relu_vit import causal, fig1, fig2, fig3, fig4, learned, lengths, masked

FILES = (fig1, fig2, fig3, fig4, learned, lengths, causal, masked)
