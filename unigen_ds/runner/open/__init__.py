"""A checkpoint or a directory -> a model to use: ``open_inferencer``, ``open_model``, ``export_checkpoint``
(``trained.py``). ``evaluated.py`` is the start of an evaluation.
"""
