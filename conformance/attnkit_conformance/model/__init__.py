"""The types of a case, an op and a bound."""
