"""One record of a file -> the turns of a conversation.

In: a mapping, with the folder of its file. Out: ``Turn`` values: who speaks, a text or an image, learned or not.
``records.py`` has the layouts, ``ratings.py`` nanoVLM's ratings; ``unusable.py`` is what happens to a bad record.
"""
