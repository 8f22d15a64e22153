"""The training loop of every study, and its parts."""
