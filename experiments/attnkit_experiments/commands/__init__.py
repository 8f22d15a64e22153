"""What the command line does beyond its own words, a file per command; `runner` is `run`."""
