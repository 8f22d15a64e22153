"""One file per figure or table; this is the list of them."""

from __future__ import annotations

from experiments.recipes import r000_fig1, r000_fig2, r000_fig3, r000_fig4
from experiments.study import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.id: recipe for recipe in (r000_fig1.RECIPE, r000_fig2.RECIPE, r000_fig3.RECIPE, r000_fig4.RECIPE)
}
