"""What a case, an op and a bound are."""
