"""Settings -> everything that the loop uses, in stages: engine, plan, data, checklist, hooks, model, prepared engine.

``stages.py`` has the stages, ``build.py`` makes each object, ``parts.py`` runs all stages over all processes
(``build_parts``), which compares the ranks, and loads a checkpoint (``restore``).
"""
