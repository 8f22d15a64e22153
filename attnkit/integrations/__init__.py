"""attnkit in models of other packages. Each module here imports its library; attnkit itself imports none of them."""
