"""attnkit in other people's models. Each module here imports its library; attnkit itself imports none of them."""
