"""A checkpoint or a directory -> a model to use (``trained.py``), its losses and metrics (``evaluated.py``)."""
