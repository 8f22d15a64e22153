"""Rows of the op database, a file per family, named as in the reference and in attnkit."""
