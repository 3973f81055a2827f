"""Records of files -> packed batches, in an order that any number of processes reproduces.

The pipeline, folder by folder: ``sources/`` (files) -> ``records/`` -> ``samples/`` -> ``index/`` -> ``datasets/`` ->
``order/`` -> ``batches/``. ``images/`` and ``text/`` are used by samples, ``cache/`` by the index. The class to know
is ``SequenceStream`` in ``batches/stream.py``: any position of it can be computed, so a resume begins anywhere.
"""
