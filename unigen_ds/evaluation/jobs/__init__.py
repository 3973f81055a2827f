"""Evaluations by another process: ``AsyncEvaluateHook``, and public benchmarks by lmms-eval.

In: a checkpoint and a task, as a file. Out: a file of results, which the run reads when it is there.
"""
