"""A page in which a person talks to a model: ``python tools/app.py CKPT``.

In: paths of checkpoints, as of ``tools/generate.py``. Out: a web page (``page.py``, which alone needs Gradio). What a
model can do is declared by its inferencer (``ability.py``: ``Ability``); ``Service`` (``answering.py``) answers.
"""
