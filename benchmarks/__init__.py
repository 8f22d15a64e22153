"""Measurements of attnkit against the best alternative in the same process."""
