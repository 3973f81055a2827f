"""What must be known of all records before training: lengths, digests, unusable ones.

In: a source and a processor. Out: an ``Index`` on disk, mapped by every process. ``planning.py`` makes it, by
one process or several; ``token_cache.py`` keeps token ids.
"""
