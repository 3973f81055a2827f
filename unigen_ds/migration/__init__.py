"""Settings of other trainers -> a config of this one: ``tools/migrate.py``.

``commands.py`` reads command lines, shell scripts and YAML, and ``static_config.py`` configs in Python, without
executing anything of them. ``bagel_flags.py``, ``decoder_flags.py``, ``nanovlm_flags.py`` and ``xtuner_config.py`` know
the names of one guide each (the first of two). ``draft.py`` has the config that is made, with a comment for whatever
has no counterpart.
"""
