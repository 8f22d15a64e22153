"""SOFT's image models."""
