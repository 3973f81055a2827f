"""What must be known of all records before training: lengths, digests, unusable ones.

In: a source and a processor. Out: an ``Index`` on disk (``index.py``), made by one process or several, mapped by all.
Order and packing need nothing else: a record is read when it is trained on. The class to know is ``Index``.
"""
