"""Settings of other trainers -> a config of this one: ``tools/migrate.py``.

``commands.py`` reads one command line, or YAML, without a shell; a config in Python is read by mmengine. ``guides.py``
and ``xtuner.py`` have the names of the guides. ``Draft`` is the config that is made.
"""
