"""What a recipe is: settings, cells, measurements."""
