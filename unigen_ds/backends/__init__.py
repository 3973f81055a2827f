"""One engine each, with the interface ``Backend`` of ``base.py``; ``single.py`` is the reference of the others."""
