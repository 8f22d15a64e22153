"""One training loop for every study, and what it stands on."""
