"""A small package of one's own: a model, its data, and how it was trained."""
