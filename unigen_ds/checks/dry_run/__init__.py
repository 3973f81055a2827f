"""What would fail before the first update: ``tools/train.py CONFIG --dry-run``.

In: a config. Out: one ``Checked`` for each question, in the order of ``CHECKS`` (``dry_run.py``), each a function of
what is ``Known`` so far (``known.py``).
"""
