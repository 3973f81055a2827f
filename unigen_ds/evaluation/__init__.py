"""Values of a model on data that it has not learned: losses, metrics, comparisons.

In: a backend or a model, and validation data. Out: numbers with their provenance. ``validation.py`` computes losses,
``scoring.py`` one whole evaluation, ``metrics/`` one class each, ``jobs/`` evaluations in other processes.
"""
