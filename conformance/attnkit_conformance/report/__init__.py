"""Reports of verdicts for people and machines: pages, files, the terminal."""
