"""Settings -> all that the loop uses: the stages are in ``stages.py``, and ``parts.py`` runs them."""
