"""Models of the papers, built on attnkit.nn."""
