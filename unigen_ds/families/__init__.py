"""Kinds of models, one package each: the model, its processor, its published directories, its inference.

``models/`` has the layers that several share.
"""
