"""Parameters -> groups with their learning rates, and an optimizer for them.

In: a model's named parameters and ``OptimizerConfig``. Out: a ``torch.optim.Optimizer`` that every engine can shard.
Start with ``optimizer.py``; a model's parameters are grouped in ``param_groups.py``.
"""
