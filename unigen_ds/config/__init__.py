"""A config file -> values with the overrides applied; and the typed sections that check them.

In: a path or name and ``key=value`` words. Out: a mapping (``file.py``, ``overrides.py``), or a frozen ``Section``. The
class to know is ``Section``: each package declares its own in ``settings.py``; ``registry`` maps names to classes.
"""
