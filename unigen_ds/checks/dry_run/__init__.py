"""What would fail before the first update: ``tools/train.py CONFIG --dry-run``.

In: a config. Out: one ``Checked`` for each question, in the order of ``CHECKS`` (``checks.py``). A check is a function
of what is ``Known`` so far (``context.py``); ``dry_run.py`` runs them.
"""
