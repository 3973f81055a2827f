"""Arrays on disk that several processes map: written once, whole or not at all.

In: named arrays, and the files that they are made of. Out: the same arrays, mapped, at every later start, as long as
the digest of the files is theirs. ``array_cache.py`` has all of it; the function to know is ``load_or_fill``.
"""
