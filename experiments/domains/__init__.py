"""What the recipes of one kind of data share, a file for each."""
