"""The analyses that take arrays."""
