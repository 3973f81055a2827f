"""Parts -> a trained model: ``Runner`` in ``runner.py``, and ``updates.py``, one update."""
