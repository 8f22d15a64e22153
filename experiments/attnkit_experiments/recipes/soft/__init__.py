"""Lu et al. 2021, *SOFT: Softmax-free Transformer with Linear Complexity*."""

from attnkit_experiments.recipes.soft import (
    fig1b,
    fig3,
    fig4,
    halving,
    kernel,
    sampling,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
)

FILES = (table1, table4, table5, table6, fig3, fig4, kernel, sampling, table2, table3, fig1b, halving)
