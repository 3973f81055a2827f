"""One engine each, with one interface: ``Backend`` in ``base.py``.

In: a model, an optimizer's config and batches. Out: losses of an update, and state that a checkpoint can store.
``single.py`` is one process and the reference of the others, which have a folder each: ``deepspeed/``, ``fsdp/``.
"""
