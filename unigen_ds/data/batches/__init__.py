"""Sequences -> micro-batches of a rank, and what is reported of them.

In: datasets, order and a ``Cursor``. Out: ``Batch`` values (``loader.py``). ``SequenceStream`` (``stream.py``) deals
sequences to ranks; ``change.py`` compares the data with that of a checkpoint.
"""
