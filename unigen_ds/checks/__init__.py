"""What a user asks before a run starts; nothing here changes a run.

``dry_run/`` makes every check of a start, ``memory/`` plans bytes without having them, ``resume.py`` shows what a
resume would do, ``certificate.py`` kills a short copy of the run, resumes it and compares.
"""
