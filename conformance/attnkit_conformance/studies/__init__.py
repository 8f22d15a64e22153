"""What the kit and attnkit are put to: bugs planted in an adapter, mutants of attnkit, ops under transformations."""
