"""Arrays on disk that several processes map: written once, whole or not at all.

``array_cache.py`` is keyed by the content that it is made of (``content.py``).
"""
