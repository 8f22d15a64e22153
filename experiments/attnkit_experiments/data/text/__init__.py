"""Text and sentence pairs: lines, subwords, documents, batches of tokens."""
