"""Settings -> everything that the loop uses, in stages: engine, plan, data, checklist, hooks, model, prepared engine.

``stages.py`` has the stages, ``build.py`` makes each object, ``parts.py`` runs all stages over all processes
(``build_parts``), ``agreement.py`` compares the ranks, ``adopt.py`` and ``restore.py`` load a checkpoint.
"""
