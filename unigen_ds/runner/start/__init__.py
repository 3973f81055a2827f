"""Settings -> everything that the loop uses: ``build_parts`` in ``parts.py``.

``begin.py`` decides about a resume, ``build.py`` makes each object, ``agreement.py`` compares the ranks,
``adopt.py`` and ``restore.py`` load a checkpoint.
"""
