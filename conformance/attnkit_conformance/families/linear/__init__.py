"""Linear, cosine, Performer and efficient attention."""
