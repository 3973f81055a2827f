"""The bytes that a run needs, found before it starts: ``tools/plan.py`` (``planned.py``).

The engines run one update on tensors without memory (``traced.py``), whose bytes are counted (``counted.py``).
"""
