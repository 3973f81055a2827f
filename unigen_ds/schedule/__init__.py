"""Learning rates as functions of progress.

In: the curves of a config, in its units. Out: the learning rate of each parameter group at any progress, of which
nothing can be lost. ``curves.py`` has the curves; the class to know is ``Schedules`` (``schedule.py``).
"""
