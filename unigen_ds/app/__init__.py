"""A page in which a person talks to a model: ``python tools/app.py CKPT``.

In: paths of checkpoints, as of ``tools/generate.py``. Out: a web page (``page.py``; Gradio is imported there alone). What a
model can do is declared by its inferencer (``ability.py``: ``Ability``); ``answering.py``: ``Service`` opens models and
answers one request at a time.
"""
