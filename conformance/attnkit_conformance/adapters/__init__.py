"""attnkit on every backend, seen through the same door as third parties."""
