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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

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
    lr, decay, paramwise = optimizer.lr, optimizer.decay, paramwise or Paramwise()
    adamw = _AdamW(optimizer.adamw) if optimizer.adamw is not None else None
    where = "optim_wrapper.paramwise_cfg"
    mults = {"norm": paramwise.norm_decay_mult, "bias": paramwise.bias_decay_mult}
    rules = [_rule(group, lr=lr, weight_decay=decay) for group in paramwise.groups]
    rules += custom_rules(paramwise.custom_keys, lr=lr, weight_decay=decay)
    names = [DEFAULT, *(rule.name for rule in rules)]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}.groups has the names {names[1:]}", allowed=f"names that differ, none {DEFAULT!r}")

    named = list(named_parameters)
    everything, trainable = _distinct(named)
    if not trainable:
        raise ConfigError("the model has no trainable parameter", remedy="remove something from model.freeze")
    members = _assign(trainable, everything, rules)
    settings = {DEFAULT: (lr, decay if lr else 0.0), **{rule.name: (rule.lr, rule.weight_decay) for rule in rules}}
    by_name = dict.fromkeys(names, mults) | {rule.name: {} for rule in rules if rule.custom}
    if adamw is None:
        return [
            group
            for name in names
            for group in _split(name, *settings[name], members[name], trainable, by_name[name])
            if group.parameters
        ]
    matrices = adamw.others(trainable, named)
    own: dict[str, _Rule | None] = {DEFAULT: None, **{rule.name: rule for rule in rules}}
    found: list[ParamGroup] = []
    for name in names:
        rest = [each for each in members[name] if each not in matrices]
        found += _split(name, *settings[name], [n for n in members[name] if n in matrices], trainable, by_name[name])
        found += [
            replace(group, by_adamw=True)
            for group in _split(f"{name}.{_ADAMW}", *adamw.settings(own[name], lr=lr), rest, trainable, by_name[name])
        ]
    return [group for group in found if group.parameters]


class _AdamW:
    """``optim_wrapper.optimizer.adamw``: what AdamW trains beside an optimizer of whole matrices, and how."""

    def __init__(self, settings: AdamWPart) -> None:
        self._lr, self._weight_decay = settings.lr, settings.decay
        self._searches = {pattern: _search(pattern) for pattern in settings.patterns}

    def others(self, trainable: Mapping[str, Parameter], named: Sequence[tuple[str, Parameter]]) -> set[str]:
        """Names of the matrices that are not AdamW's by any of their names. Raises ``ConfigError`` for none."""
        names: dict[int, list[str]] = {}
        for name, parameter in named:
            names.setdefault(id(parameter), []).append(name)
        for pattern, search in self._searches.items():
            if not any(search(name) for parameter in trainable.values() for name in names[id(parameter)]):
                raise ConfigError(
                    f"{WHERE}.adamw.patterns: {pattern!r} matches no trained parameter",
                    remedy=f"names are {_some(list(trainable))}",
                )
        found = {
            name
            for name, parameter in trainable.items()
            if _dimensions(parameter) == 2 and not any(map(self._is_adamws, names[id(parameter)]))
        }
        if not found:
            raise ConfigError(
                f"no trained parameter is a matrix that {WHERE} trains: all are 1-D, embeddings, heads or in"
                " adamw.patterns",
                remedy="type='AdamW'",
            )
        return found

    def _is_adamws(self, name: str) -> bool:
        parts = any(_INPUT_OR_OUTPUT.search(part) for part in name.split("."))
        return parts or any(search(name) for search in self._searches.values())

    def settings(self, rule: _Rule | None, *, lr: float) -> tuple[float, float]:
        """Learning rate and weight decay of a group's part: a rule changes the rate by the same factor as ``lr``."""
        if rule is None:
            return self._lr, self._weight_decay if self._lr else 0.0
        own = self._lr * (rule.lr / lr if lr else 1.0)
        decay = self._weight_decay * rule.decay_mult if rule.given_decay is None else rule.given_decay
        return own, decay if own else 0.0


class _Rule:
    """One entry of ``paramwise_cfg``, with its numbers worked out."""

    def __init__(
        self,
        *,
        name: str,
        pattern: str,
        lr: float,
        weight_decay: float,
        given_decay: float | None = None,
        decay_mult: float = 1.0,
        custom: bool = False,
    ) -> None:
        self.name, self.pattern, self.lr, self.weight_decay = name, pattern, lr, weight_decay
        self.given_decay = given_decay
        """The rule's own weight decay, where it has one."""
        self.decay_mult = decay_mult
        self.custom = custom
        """Of ``custom_keys``: a part of a name, to which the multipliers of norms and biases do not apply."""
        self.matches = _part_of(pattern) if custom else _search(pattern)


def _search(pattern: str) -> Callable[[str], bool]:
    """Whether a name has a pattern: as a part of it, or as a regular expression."""
    try:
        search = re.compile(pattern).search
    except re.error:  # not a regular expression: then it is a part of a name
        search = re.compile(re.escape(pattern)).search
    return lambda name: pattern in name or search(name) is not None


def _part_of(key: str) -> Callable[[str], bool]:
    """Whether a name has a key of ``custom_keys``. mmengine writes the module's name before a parameter's."""
    return lambda name: key in (name if "." in name else f".{name}")


def _rule(group: Group, *, lr: float, weight_decay: float) -> _Rule:
    own = (lr if group.lr is None else group.lr) * (1.0 if group.lr_mult is None else group.lr_mult)
    decay = weight_decay if group.weight_decay is None else group.weight_decay
    name = group.pattern if group.name is None else group.name
    return _Rule(
        name=name, pattern=group.pattern, lr=own, weight_decay=decay if own else 0.0, given_decay=group.weight_decay
    )


def custom_rules(custom_keys: Mapping[str, CustomKey], *, lr: float, weight_decay: float) -> list[_Rule]:
    """mmengine's ``custom_keys`` in the order in which its ``DefaultOptimWrapperConstructor`` looks for a match: the
    longest first, of equally long ones in the order of the alphabet.
    """
    return [
        _Rule(
            name=key,
            pattern=key,
            lr=lr * mult.lr_mult,
            weight_decay=weight_decay * mult.decay_mult if lr * mult.lr_mult else 0.0,
            decay_mult=mult.decay_mult,
            custom=True,
        )
        for key, mult in sorted(sorted(custom_keys.items()), key=lambda pair: len(pair[0]), reverse=True)
    ]


def _distinct(named: Iterable[tuple[str, Parameter]]) -> tuple[list[str], dict[str, Parameter]]:
    """All names, and the trainable parameters, each tied one once."""
    everything: list[str] = []
    trainable: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, parameter in named:
        everything.append(name)
        if id(parameter) not in seen and parameter.requires_grad:
            trainable[name] = parameter
        seen.add(id(parameter))
    return everything, trainable


def _assign(
    trainable: Mapping[str, Parameter], everything: Sequence[str], rules: Sequence[_Rule]
) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {DEFAULT: [], **{rule.name: [] for rule in rules}}
    for name in trainable:
        first = next((rule.name for rule in rules if rule.matches(name)), DEFAULT)
        members[first].append(name)
    for rule in rules:
        if not members[rule.name]:
            _explain_empty(rule, trainable, everything)
    return members


def _explain_empty(rule: _Rule, trainable: Mapping[str, Parameter], everything: Sequence[str]) -> None:
    taken = [name for name in trainable if rule.matches(name)]
    if taken and rule.custom:
        logger().warning("custom_keys: %r has no effect: longer keys match all that it matches", rule.pattern)
        return
    if taken:
        raise ConfigError(
            f"pattern {rule.pattern!r} matches only what an earlier pattern matched ({_some(taken)})",
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
    shown = list(names[::stride])[:_SHOWN]
    return ", ".join(shown) + (f", ... ({len(names)} in all)" if len(names) > len(shown) else "")


def _split(
    group: str,
    lr: float,
    weight_decay: float,
    names: Sequence[str],
    trainable: Mapping[str, Parameter],
    mults: Mapping[str, float],
) -> list[ParamGroup]:
    parts: dict[str, list[str]] = {"": [], "norm": [], "bias": []}
    for name in names:
        part = _part(name, trainable[name])
        parts["" if not part or mults.get(part, 1.0) == 1.0 else part].append(name)
    return [
        ParamGroup(
            name=f"{group}.{part}" if part else group,
            lr=lr,
            weight_decay=weight_decay * mults.get(part, 1.0),
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
