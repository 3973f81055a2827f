"""What would fail before the first update: ``tools/train.py CONFIG --dry-run``.

In: a config. Out: a ``Checked`` for each of ``CHECKS`` (``dry_run.py``), functions of what is ``Known`` (``known.py``).
"""
