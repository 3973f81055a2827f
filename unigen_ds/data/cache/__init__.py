"""Arrays on disk that several processes map: written once, whole or not at all.

``array_cache.py`` has them, and the digest of data files, by which they are found again.
"""
