"""Turns -> a sample: the units that a model reads or learns, with their lengths.

In: ``Turn`` values. Out: a ``Sample`` of ``Split`` objects (``sample.py``), made by a ``ConversationProcessor``;
``PackedBuilder`` (``splits.py``) turns several into one packed batch.
"""
