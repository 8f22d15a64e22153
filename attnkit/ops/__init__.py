"""The ops as array-API bodies: a file per variant, a package per family."""
