"""Training in place: the built-in one, batches, losses, random state, evaluation."""
