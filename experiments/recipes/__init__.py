"""One file per figure or table; this is the list of them."""

from __future__ import annotations

from experiments.recipes import r000_fig1, r000_fig2, r000_fig3, r000_fig4, r002_table6
from experiments.study import Recipe

RECIPES: dict[str, Recipe] = {
    module.RECIPE.id: module.RECIPE for module in (r000_fig1, r000_fig2, r000_fig3, r000_fig4, r002_table6)
}
