"""What happens around the loop, one class each (``base.py``): ``log/``, ``save/``, ``guard/`` (stops a run that goes
wrong), ``evaluate/``. ``settings.py`` lists the default ones; ``mmengine.py`` runs hooks written for mmengine."""
