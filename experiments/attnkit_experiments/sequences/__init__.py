"""Classification of long sequences."""
