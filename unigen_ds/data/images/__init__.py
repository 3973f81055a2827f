"""Image files -> pixels.

In: a path or bytes inside of another file (``StoredImage``). Out: arrays of the sizes that a model reads
(``ImageTransform`` in ``image_files.py``, ``tiles.py``). An image that cannot be read is an ``UnreadableImage``.
"""
