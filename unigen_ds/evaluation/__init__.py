"""Floor 4: judge what a model produces."""
