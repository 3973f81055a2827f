"""Files -> records, one format in each module.

In: a path, a folder, a pattern or a URL. Out: a ``RecordSource`` (``base.py``): a number of records, any of which is
read by its number. ``find.py`` chooses the format; ``shard_files.py`` has what streaming needs.
"""
