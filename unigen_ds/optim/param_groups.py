"""Named parameters in, parameter groups out: which learning rate and weight decay each parameter has.

``paramwise_cfg = dict(groups=[dict(pattern='connector', lr=5e-3)], norm_decay_mult=0.0, bias_decay_mult=0.0)``

A pattern is part of a name, or a regular expression searched in it; the first that matches wins; the rest is the group
``default``. A learning rate of 0 freezes: the parameters stay in a group with learning rate 0 and weight decay 0, still
in the optimizer and in its checkpoints, so unfreezing them on resume needs no new layout. (``requires_grad=False``
leaves them out, and no moments are kept for them.) Whether a parameter is a norm or a bias follows from names and from
the *logical* shape: under ZeRO-3 ``p.shape`` is ``(0,)`` for every parameter, so the usual ``p.ndim < 2`` would decay
nothing.

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
from unigen_ds.optim.settings import AdamWPart, CustomKey, Group, Optimizer, Paramwise
from unigen_ds.system.log import logger

DEFAULT = "default"
_NORM = re.compile(r"norm|^ln(_\w+|\d*)$", re.IGNORECASE)
_INPUT_OR_OUTPUT = re.compile(r"emb|^w[tp]e$|(^|_)(head|logits|classifier)$", re.IGNORECASE)
"""Names of modules and parameters that are embeddings or heads."""
_ADAMW = "adamw"
_SHOWN = 5


def build_param_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    optimizer: Optimizer,
    paramwise: Paramwise | None = None,
) -> list[ParamGroup]:
    """Groups of the trainable parameters: ``default`` first, then ``paramwise_cfg.groups`` in order; none is empty.

    A multiplier of norms or biases splits a group into ``<group>``, ``<group>.norm`` and ``<group>.bias``, an optimizer
    of whole matrices into ``<group>`` and ``<group>.adamw``. Tied parameters are counted once, under their first name.
    Raises ``ConfigError`` for a pattern that no parameter is left for.
    """
    paramwise, adamw = paramwise or Paramwise(), optimizer.adamw
    rules = [_rule(Group(pattern=DEFAULT), optimizer), *(_rule(group, optimizer) for group in paramwise.groups)]
    rules += _custom_rules(paramwise.custom_keys, optimizer)
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        where, allowed = "optim_wrapper.paramwise_cfg.groups", f"names that differ, none {DEFAULT!r}"
        raise ConfigError(f"{where} has the names {names[1:]}", allowed=allowed)
    parameters = list(named_parameters)
    everything, trainable = _distinct(parameters)
    if not trainable:
        raise ConfigError("the model has no trainable parameter", remedy="remove something from model.freeze")
    members = _assign(trainable, everything, rules)
    matrices = {*trainable} if adamw is None else _matrices(adamw, trainable, parameters)
    groups: list[ParamGroup] = []
    for rule in rules:
        mults = {} if rule.custom else {"norm": paramwise.norm_decay_mult, "bias": paramwise.bias_decay_mult}
        own = [name for name in members[rule.name] if name in matrices]
        groups += _split(rule, own, trainable, mults)
        if adamw is not None:
            others = [name for name in members[rule.name] if name not in matrices]
            parts = _split(_of_adamw(rule, adamw, lr=optimizer.lr), others, trainable, mults)
            groups += [replace(group, by_adamw=True) for group in parts]
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


def _custom_rules(custom_keys: Mapping[str, CustomKey], optimizer: Optimizer) -> list[_Rule]:
    """mmengine's ``custom_keys`` in the order in which its ``DefaultOptimWrapperConstructor`` looks for a match: the
    longest first, of equally long ones in the order of the alphabet.
    """
    rules = []
    for key, mult in sorted(sorted(custom_keys.items()), key=lambda pair: len(pair[0]), reverse=True):
        lr = optimizer.lr * mult.lr_mult
        decay = optimizer.decay * mult.decay_mult if lr else 0.0
        rules.append(_Rule(key, lr, decay, key, decay_mult=mult.decay_mult, custom=True))
    return rules


def _of_adamw(rule: _Rule, adamw: AdamWPart, *, lr: float) -> _Rule:
    """The part of a group that AdamW trains beside an optimizer of whole matrices, whose rate is ``lr``: a rule changes
    both rates by the same factor.
    """
    own = adamw.lr * (rule.lr / lr if lr else 1.0)
    decay = adamw.decay * rule.decay_mult if rule.own_decay is None else rule.own_decay
    return replace(rule, name=f"{rule.name}.{_ADAMW}", lr=own, weight_decay=decay if own else 0.0)


def _matrices(
    adamw: AdamWPart, trainable: Mapping[str, Parameter], named_parameters: Sequence[tuple[str, Parameter]]
) -> set[str]:
    """Names of the matrices that are not AdamW's by any of their names. Raises ``ConfigError`` where there is none."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), []).append(name)
    for pattern in adamw.patterns:
        if not any(_has(name, pattern) for parameter in trainable.values() for name in names[id(parameter)]):
            problem = f"{WHERE}.adamw.patterns: {pattern!r} matches no trained parameter"
            raise ConfigError(problem, remedy=f"names are {_some(list(trainable))}")

    def is_adamws(name: str) -> bool:
        part = any(_INPUT_OR_OUTPUT.search(part) for part in name.split("."))
        return part or any(_has(name, pattern) for pattern in adamw.patterns)

    matrices = {
        name
        for name, parameter in trainable.items()
        if _dimensions(parameter) == 2 and not any(map(is_adamws, names[id(parameter)]))
    }
    if not matrices:
        raise ConfigError(
            f"no trained parameter is a matrix that {WHERE} trains: all are 1-D, embeddings, heads or in"
            " adamw.patterns",
            remedy="type='AdamW'",
        )
    return matrices


def _distinct(named_parameters: Iterable[tuple[str, Parameter]]) -> tuple[list[str], dict[str, Parameter]]:
    """All names, and the trainable parameters, each tied one once."""
    everything: list[str] = []
    trainable: dict[str, Parameter] = {}
    ids: set[int] = set()
    for name, parameter in named_parameters:
        everything.append(name)
        if id(parameter) not in ids and parameter.requires_grad:
            trainable[name] = parameter
        ids.add(id(parameter))
    return everything, trainable


def _assign(
    trainable: Mapping[str, Parameter], everything: Sequence[str], rules: Sequence[_Rule]
) -> dict[str, list[str]]:
    """Group -> its parameters: those of the first rule that matches, else of ``default``, the first of ``rules``."""
    members: dict[str, list[str]] = {rule.name: [] for rule in rules}
    for name in trainable:
        first = next((rule.name for rule in rules[1:] if rule.matches(name)), DEFAULT)
        members[first].append(name)
    for rule in rules[1:]:
        if not members[rule.name]:
            _explain_empty(rule, trainable, everything)
    return members


def _explain_empty(rule: _Rule, trainable: Mapping[str, Parameter], everything: Sequence[str]) -> None:
    matches = [name for name in trainable if rule.matches(name)]
    if matches and rule.custom:
        logger().warning("custom_keys: %r has no effect: longer keys match all that it matches", rule.pattern)
        return
    if matches:
        raise ConfigError(
            f"pattern {rule.pattern!r} matches only what an earlier pattern matched ({_some(matches)})",
            remedy="put the more specific pattern first",
        )
    frozen = [name for name in everything if rule.matches(name)]
    if not frozen:
        raise ConfigError(f"pattern {rule.pattern!r} matches no parameter", remedy=f"names are {_some(everything)}")
    logger().warning(
        "paramwise_cfg: pattern %r has no effect: what it matches is frozen or tied (%s)", rule.pattern, _some(frozen)
    )


def _some(names: Sequence[str]) -> str:
    """A few names, spread over the model."""
    stride = max(1, len(names) // _SHOWN)
    some = list(names[::stride])[:_SHOWN]
    return ", ".join(some) + (f", ... ({len(names)} in all)" if len(names) > len(some) else "")


def _split(
    rule: _Rule, names: Sequence[str], trainable: Mapping[str, Parameter], mults: Mapping[str, float]
) -> list[ParamGroup]:
    """The group of a rule, without its norms and biases where they have a multiplier, and these."""
    parts: dict[str, list[str]] = {"": [], "norm": [], "bias": []}
    for name in names:
        part = _part(name, trainable[name])
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


def _part(name: str, parameter: Parameter) -> str:
    """``norm``, ``bias`` or neither. A norm's bias counts as norm, as in mmengine."""
    *modules, leaf = name.split(".")
    if _dimensions(parameter) == 1 and (leaf == "weight" or (modules and _NORM.search(modules[-1]))):
        return "norm"  # a layer's 1-D weight is a norm's, whatever the layer is called
    return "bias" if leaf == "bias" or leaf.endswith("_bias") else ""


def _dimensions(parameter: Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))
