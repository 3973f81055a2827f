"""A config -> ``Settings``, the frozen tree of all sections: ``tree.py``.

The modules of ``custom_imports`` are imported first, ``family_settings.py`` adds what a family declares,
``environment.py`` and ``naming.py`` are two of the sections.
"""
