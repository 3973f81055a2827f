"""Named parameters in, parameter groups out: which learning rate and weight decay each parameter has.

``paramwise_cfg = dict(groups=[dict(pattern='connector', lr=5e-3)], norm_decay_mult=0.0, bias_decay_mult=0.0)``

A pattern is part of a name, or a regular expression searched in it; the first that matches wins; the rest is the group
``default``. A learning rate of 0 freezes: the parameters stay in a group with learning rate 0 and weight decay 0, still
in the optimizer and in its checkpoints, so unfreezing them on resume needs no new layout. (``requires_grad=False``
leaves them out, and no moments are kept for them.) Whether a parameter is a norm or a bias follows from names and from
the *logical* shape: under ZeRO-3 every ``p.shape`` is ``(0,)``, and the usual ``p.ndim < 2`` would decay nothing.

An optimizer of whole matrices (Muon) trains the matrices of each group. Everything that is not two-dimensional, the
embeddings and the head are AdamW's: in ``<group>.adamw``, with the settings of ``optim_wrapper.optimizer.adamw``. Which
matrix is an embedding or a head is read from its name; ``adamw.patterns`` names others. Input and output layers do
better with AdamW: https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.nn import Parameter

from unigen_ds.core.errors import ConfigError
from unigen_ds.optim.optimizer import WHERE, ParamGroup
from unigen_ds.optim.settings import AdamWPart, Group, Optimizer, Paramwise
from unigen_ds.system.log import logger

DEFAULT = "default"
_NORM = re.compile(r"norm|^ln(_\w+|\d*)$", re.IGNORECASE)
_INPUT_OR_OUTPUT = re.compile(r"emb|^w[tp]e$|(^|_)(head|logits|classifier)$", re.IGNORECASE)
"""Names of modules and parameters that are embeddings or heads."""


def build_param_groups(
    named_parameters: Iterable[tuple[str, Parameter]], optimizer: Optimizer, paramwise: Paramwise | None = None
) -> list[ParamGroup]:
    """Groups of the trainable parameters: ``default`` first, then ``paramwise_cfg.groups`` in order; none is empty. A
    multiplier of norms or biases splits a group into ``<group>``, ``<group>.norm`` and ``<group>.bias``, an optimizer
    of whole matrices into ``<group>`` and ``<group>.adamw``. Tied parameters count once, under their first name. Raises
    ``ConfigError`` for a pattern that no parameter is left for.
    """
    paramwise, adamw = paramwise or Paramwise(), optimizer.adamw
    rules = [_rule(Group(pattern=DEFAULT), optimizer), *(_rule(group, optimizer) for group in paramwise.groups)]
    # mmengine's custom_keys in its order of matching: the longest first, of equally long ones by the alphabet
    for key in sorted(sorted(paramwise.custom_keys), key=len, reverse=True):
        lr, mult = optimizer.lr * paramwise.custom_keys[key].lr_mult, paramwise.custom_keys[key].decay_mult
        rules.append(_Rule(key, lr, optimizer.decay * mult if lr else 0.0, key, decay_mult=mult, custom=True))
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        where, choices = "optim_wrapper.paramwise_cfg.groups", f"names that differ, none {DEFAULT!r}"
        raise ConfigError(f"{where} has the names {names[1:]}", allowed=choices)
    names_of: dict[int, list[str]] = {}
    parameters = dict(named_parameters)
    for name, parameter in parameters.items():
        names_of.setdefault(id(parameter), []).append(name)
    trainable = {n: p for n, p in parameters.items() if p.requires_grad and names_of[id(p)][0] == n}
    if not trainable:
        raise ConfigError("the model has no trainable parameter", remedy="remove something from model.freeze")
    members = _assign(trainable, list(parameters), rules)
    matrices = {*trainable}
    if adamw is not None:
        matrices = _matrices(adamw, {n: (p, names_of[id(p)]) for n, p in trainable.items()})
    groups: list[ParamGroup] = []
    for rule in rules:
        mults = {} if rule.custom else {"norm": paramwise.norm_decay_mult, "bias": paramwise.bias_decay_mult}
        groups += _split(rule, [name for name in members[rule.name] if name in matrices], trainable, mults)
        if adamw is not None:
            others = [name for name in members[rule.name] if name not in matrices]
            # a rule changes both rates by the same factor
            lr = adamw.lr * (rule.lr / optimizer.lr if optimizer.lr else 1.0)
            decay = adamw.decay * rule.decay_mult if rule.own_decay is None else rule.own_decay
            of_adamw = replace(rule, name=f"{rule.name}.adamw", lr=lr, weight_decay=decay if lr else 0.0)
            groups += [replace(group, by_adamw=True) for group in _split(of_adamw, others, trainable, mults)]
    return [group for group in groups if group.parameters]


@dataclass(frozen=True)
class _Rule:
    """One entry of ``paramwise_cfg``, or ``default``, with its numbers worked out."""

    name: str
    lr: float
    weight_decay: float
    pattern: str = ""
    own_decay: float | None = None
    """The entry's own weight decay, where it has one."""
    decay_mult: float = 1.0
    custom: bool = False
    """Whether it is one of ``custom_keys``: then the multipliers of norms and biases do not apply."""

    def matches(self, name: str) -> bool:
        """mmengine writes the module's name before a parameter's."""
        return self.pattern in (name if "." in name else f".{name}") if self.custom else _has(name, self.pattern)


def _has(name: str, pattern: str) -> bool:
    """Whether a name has a pattern: as a part of it, or as a regular expression."""
    try:
        return pattern in name or re.search(pattern, name) is not None
    except re.error:  # not a regular expression: then it is a part of a name
        return False


def _rule(group: Group, optimizer: Optimizer) -> _Rule:
    lr = (optimizer.lr if group.lr is None else group.lr) * (1.0 if group.lr_mult is None else group.lr_mult)
    decay = optimizer.decay if group.weight_decay is None else group.weight_decay
    name = group.pattern if group.name is None else group.name
    return _Rule(name, lr, decay if lr else 0.0, group.pattern, own_decay=group.weight_decay)


def _matrices(adamw: AdamWPart, trainable: Mapping[str, tuple[Parameter, Sequence[str]]]) -> set[str]:
    """Names of the matrices that are not AdamW's by any of their names. Raises ``ConfigError`` where there is none."""
    every_name = [name for _, names in trainable.values() for name in names]
    for pattern in adamw.patterns:
        if not any(_has(name, pattern) for name in every_name):
            problem = f"{WHERE}.adamw.patterns: {pattern!r} matches no trained parameter"
            raise ConfigError(problem, remedy=f"names are {_some(list(trainable))}")

    def is_adamws(name: str) -> bool:
        part = any(_INPUT_OR_OUTPUT.search(part) for part in name.split("."))
        return part or any(_has(name, pattern) for pattern in adamw.patterns)

    matrices = {n for n, (p, names) in trainable.items() if _dimensions(p) == 2 and not any(map(is_adamws, names))}
    if not matrices:
        problem = f"no trained parameter is a matrix that {WHERE} trains: all are 1-D, embeddings, heads or in"
        raise ConfigError(f"{problem} adamw.patterns", remedy="type='AdamW'")
    return matrices


def _assign(
    trainable: Mapping[str, Parameter], everything: Sequence[str], rules: Sequence[_Rule]
) -> dict[str, list[str]]:
    """Group -> its parameters: those of the first rule that matches, else of ``default``, the first of ``rules``."""
    members: dict[str, list[str]] = {rule.name: [] for rule in rules}
    for name in trainable:
        first = next((rule.name for rule in rules[1:] if rule.matches(name)), DEFAULT)
        members[first].append(name)
    for rule in (rule for rule in rules[1:] if not members[rule.name]):
        earlier, matches = ([n for n in names if rule.matches(n)] for names in (trainable, everything))
        if earlier and not rule.custom:
            raise ConfigError(
                f"pattern {rule.pattern!r} matches only what an earlier pattern matched ({_some(earlier)})",
                remedy="put the more specific pattern first",
            )
        if not matches:
            raise ConfigError(f"pattern {rule.pattern!r} matches no parameter", remedy=f"names are {_some(everything)}")
        logger().warning("paramwise_cfg: pattern %r has no effect on %s", rule.pattern, _some(matches))
    return members


def _some(names: Sequence[str]) -> str:
    """A few names, spread over the model."""
    some = list(names[:: max(1, len(names) // 5)])[:5]
    return ", ".join(some) + (f", ... ({len(names)} in all)" if len(names) > len(some) else "")


def _split(
    rule: _Rule, names: Sequence[str], trainable: Mapping[str, Parameter], mults: Mapping[str, float]
) -> list[ParamGroup]:
    """The group of a rule, without its norms and biases where they have a multiplier, and these."""
    parts: dict[str, list[str]] = {"": [], "norm": [], "bias": []}
    for name in names:
        *modules, leaf = name.split(".")
        part = "bias" if leaf == "bias" or leaf.endswith("_bias") else ""
        if _dimensions(trainable[name]) == 1 and (leaf == "weight" or (modules and _NORM.search(modules[-1]))):
            part = "norm"  # whatever the layer is called; a norm's bias counts as norm, as in mmengine
        parts["" if not part or mults.get(part, 1.0) == 1.0 else part].append(name)
    return [
        ParamGroup(
            name=f"{rule.name}.{part}" if part else rule.name,
            lr=rule.lr,
            weight_decay=rule.weight_decay * mults.get(part, 1.0),
            parameters=tuple(members),
        )
        for part, members in parts.items()
    ]


def _dimensions(parameter: Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))
