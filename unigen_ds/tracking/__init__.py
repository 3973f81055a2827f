"""Log writers besides ``metrics.jsonl``: TensorBoard, Weights & Biases.

In: lines of updates and events. Out: what the tracker shows. ``Writer`` (``writer.py``) is the interface;
``SafeWriter`` keeps a record of what each was sent, so that no line is there twice after a resume.
"""
