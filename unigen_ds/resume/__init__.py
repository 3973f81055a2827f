"""From which checkpoint a run continues (``plan.py``), what may differ (``checklist.py``), a new split of the batch."""
