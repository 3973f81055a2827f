"""A config -> ``Settings``, the frozen tree of all sections: ``tree.py``; ``family_settings.py`` adds a family's."""
