"""What the committed reports say about the papers' claims."""
