"""A config file -> values with the overrides applied; and the typed sections that check them.

The class to know is ``Section``: each package declares its own in ``settings.py``; ``registry`` maps names to classes.
"""
