"""A model and a file of records -> a config to start with: ``tools/init.py``.

In: names of a model and of data. Out: a ``FirstConfig`` (``first_config.py``): the text of a config, and each decision
with its reason. What the model, the records and this machine are is in ``inputs.py``.
"""
