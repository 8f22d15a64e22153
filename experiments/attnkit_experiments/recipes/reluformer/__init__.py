"""Shen et al. 2023, *A Study on ReLU and Softmax in Transformer*."""

from attnkit_experiments.recipes.reluformer import (
    fig1,
    fig2,
    fig3,
    fig4,
    fig5,
    layernorm,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    temperature,
)

FILES = (table1, table2, table3, table4, table5, table6, fig1, fig2, fig3, fig4, fig5, layernorm, temperature)
