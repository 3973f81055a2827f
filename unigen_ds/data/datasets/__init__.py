"""What a config's ``dataset`` names: a source with its processor, filters and share for validation.

In: settings. Out: a ``PlannedDataset`` (``dataset.py``): numbered samples with known lengths. ``adapter.py`` wraps a
user's map-style data set, ``streamed.py`` shards; ``subset.py`` is some records of a source.
"""
