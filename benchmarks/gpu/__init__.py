"""The first hour with a GPU: jobs of a few minutes each, whose results are one archive. Needs nothing but Python."""
