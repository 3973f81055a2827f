"""What a user asks before a run starts; nothing here changes a run.

``first_config/`` writes the config of a model and of data (``tools/init.py``), ``dry_run/`` runs every check
of a start (``--dry-run``), ``memory/`` plans bytes without having them (``tools/plan.py``), ``resume.py`` shows what a
resume would do (``tools/resume.py``), ``certificate.py`` kills a short copy of the run, resumes it and compares
(``tools/certify.py``).
"""
