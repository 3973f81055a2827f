"""Which sample is when: shuffle, mixture, packing, as functions of a position.

In: lengths and a seed. Out: for each sequence its samples. ``order.py`` shuffles without memory, ``mixture.py`` draws
from sources by weight, ``packing.py`` fills sequences, and ``Cursor`` is a position.
"""
