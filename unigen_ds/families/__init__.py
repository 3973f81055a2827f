"""Kinds of models, a package each: model, processor, published directories, inference. ``models/``: shared layers."""
