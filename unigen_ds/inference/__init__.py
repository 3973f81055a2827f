"""What the families' inference has in common: prompts, sampling, continuing texts, a cache of keys and values.

In: a model and ``Prompt`` values. Out: ``Generated``. ``together.py`` keeps ranks of a sharding engine in step.
"""
