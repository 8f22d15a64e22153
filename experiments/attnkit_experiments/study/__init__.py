"""The definition of a recipe: settings, cells, measurements."""
