"""The bytes that a run needs, found before it starts: ``tools/plan.py``.

In: a config and a number of processes. Out: a ``Plan`` of memory for each rank (``planned.py``). The engines
themselves run one update on tensors without memory (``traced.py``), whose bytes are counted (``counted.py``).
"""
