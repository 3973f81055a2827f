"""A checkpoint or a directory -> a model to use: ``open_inferencer``, ``open_model`` (``trained.py``).

``evaluated.py`` is the start of an evaluation, ``publish.py`` writes what others read.
"""
