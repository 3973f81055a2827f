"""What happens around the loop, one class each: ``Hook`` in ``base.py``.

By purpose: ``log/``, ``save/``, ``guard/`` (stops a run that goes wrong), ``evaluate/``. ``settings.py`` lists the
default ones in their order; ``mmengine.py`` runs hooks written for mmengine.
"""
