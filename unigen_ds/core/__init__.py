"""Values that every package uses; nothing of files, processes or configs.

``Progress`` is how far a run is, ``Geometry`` how an update is divided; ``Batch`` and ``LossTerms`` pass between
data, models and loop, ``Shard`` between engines and checkpoints. Errors are subclasses of ``UnigenError``.
"""
