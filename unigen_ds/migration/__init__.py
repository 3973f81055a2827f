"""Settings of other trainers -> a config of this one: ``tools/migrate.py``.

``commands.py`` reads one command line, or YAML, without a shell; a config in Python is read by mmengine.
``bagel_flags.py``, ``decoder_flags.py``, ``nanovlm_flags.py`` and ``xtuner_config.py`` have the names of one
guide each (the first of two). ``Draft`` is the config that is made, with a comment for whatever has no counterpart.
"""
