"""A second package of a user's own, loaded by its config: a family of texts."""
