"""A config -> ``Settings``, the frozen tree of all sections: ``tree.py``.

The modules of ``custom_imports`` are imported first, ``family_settings.py`` adds what a family declares,
``origins.py`` remembers where each value is from, ``environment.py`` and ``naming.py`` are two of the sections.
"""
