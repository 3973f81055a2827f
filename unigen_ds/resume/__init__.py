"""Decides from which checkpoint a run continues, and what may differ: the checklist.

In: a ``Manifest`` and a ``Proposal`` (what the new start would be). Out: findings, and a plan. ``checklist.py`` has a
function for each point, ``plan.py`` decides, ``geometry.py`` re-splits the batch.
"""
