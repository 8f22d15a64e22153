"""The ops as array-API bodies, a file per variant; whole families have a package."""
