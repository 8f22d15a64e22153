"""The variants of 2023 to 2026, in one model each for language and for recall."""

from attnkit_experiments.recipes.newer import causal_language, recall

FILES = (causal_language, recall)
