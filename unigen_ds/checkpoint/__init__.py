"""Checkpoints, whole or not at all: ``saver.py`` writes, ``store.py`` verifies, ``layouts/``, ``foreign.py`` read."""
