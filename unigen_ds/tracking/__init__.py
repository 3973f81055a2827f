"""Log writers besides ``metrics.jsonl``: JSON lines, TensorBoard, Weights & Biases, trackio.

In: lines of updates and events. Out: what the tracker shows. ``Writer`` (``writer.py``) is the interface; ``sent.py``
is what each was sent, so that no line is there twice after a resume.
"""
