"""Mutation testing: small errors in source texts, each of which the kit ought to see."""
