"""Settings of other trainers -> a config of this one: ``tools/migrate.py``.

``commands.py`` reads a command line or YAML, ``guides.py`` and ``xtuner.py`` fill a ``Draft`` by the guides' names.
"""
