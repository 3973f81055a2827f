"""A user's own package: its config names it in ``custom_imports``. docs/extending explains it line by line."""

from . import data, family, training  # noqa: F401 - each registers its classes
