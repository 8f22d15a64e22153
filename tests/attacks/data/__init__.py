"""Small files of every format that is read, and malformed ones, made by code."""
