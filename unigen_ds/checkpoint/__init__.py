"""Checkpoints: written whole or not at all, listed, verified, retained, merged.

In: a backend's shards. Out: a folder with a ``Manifest``, committed by its name. ``save`` (``saver.py``) writes it,
``store.py`` finds the newest valid one, ``layouts/`` read the files of each engine, ``foreign.py`` those of others.
"""
