"""attnkit's own backends as adapters, through the same interface as third parties."""
