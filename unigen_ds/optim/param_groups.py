"""Named parameters in, parameter groups out: who trains with which learning rate and weight decay.

``paramwise_cfg = dict(groups=[dict(pattern='connector', lr=5e-3)], norm_decay_mult=0.0, bias_decay_mult=0.0)``

A pattern is part of a name, or a regular expression searched in it; the first that matches wins; the rest is the group
``default``. A learning rate of 0 freezes: the parameters stay in a group with learning rate 0 and weight decay 0, still
in the optimizer and in its checkpoints, so unfreezing them on resume needs no new layout. (``requires_grad=False``
leaves them out, and no moments are kept for them.) What is a norm or a bias is read from names and from the *logical*
shape: under ZeRO-3 ``p.shape`` is ``(0,)`` for every parameter, so the customary ``p.ndim < 2`` would decay nothing.

An optimizer of whole matrices (Muon) trains the matrices of each group. Everything that is not two-dimensional, the
embeddings and the head are AdamW's: in ``<group>.adamw``, with the settings of ``optim_wrapper.optimizer.adamw``. Which
matrix is an embedding or a head is read from its name; ``adamw.patterns`` names others. Input and output layers do
better with AdamW: https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.nn import Parameter

from unigen_ds.core.errors import ConfigError, nearest
from unigen_ds.core.log import logger
from unigen_ds.core.optim import WHERE, ParamGroup, adamw_settings, default_weight_decay

DEFAULT = "default"
_RULE_KEYS = ("pattern", "name", "lr", "lr_mult", "weight_decay")
_PARAMWISE_KEYS = ("groups", "norm_decay_mult", "bias_decay_mult")
_NORM = re.compile(r"norm|^ln(_\w+|\d*)$", re.IGNORECASE)
_INPUT_OR_OUTPUT = re.compile(r"emb|^w[tp]e$|(^|_)(head|logits|classifier)$", re.IGNORECASE)
"""Names of modules and parameters that are embeddings or heads."""
_ADAMW = "adamw"
_SHOWN = 5


def build_param_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    optimizer_cfg: Mapping[str, Any],
    paramwise_cfg: Mapping[str, Any] | None = None,
) -> list[ParamGroup]:
    """Groups of the trainable parameters: ``default`` first, then ``paramwise_cfg.groups`` in order; none is empty.

    ``optimizer_cfg`` is ``dict(type, lr, weight_decay, ...)``. A multiplier of norms or biases splits a group into
    ``<group>``, ``<group>.norm`` and ``<group>.bias``, an optimizer of whole matrices into ``<group>`` and
    ``<group>.adamw``. Tied parameters are taken once, under their first name.
    Raises ``ConfigError`` for unknown keys, and for a pattern that no parameter is left for.
    """
    lr = _number(optimizer_cfg, "lr", where=WHERE)
    fallback = default_weight_decay(optimizer_cfg.get("type", "AdamW"))
    decay = _number(optimizer_cfg, "weight_decay", where=WHERE, default=fallback)
    adamw = _AdamW(given) if (given := adamw_settings(optimizer_cfg)) else None
    paramwise = paramwise_cfg or {}
    where = "optim_wrapper.paramwise_cfg"
    _check_keys(paramwise, _PARAMWISE_KEYS, where)
    mults = {part: _number(paramwise, f"{part}_decay_mult", where=where, default=1.0) for part in ("norm", "bias")}
    rules = [
        _rule(rule, f"{where}.groups[{index}]", lr=lr, weight_decay=decay)
        for index, rule in enumerate(paramwise.get("groups") or ())
    ]
    names = [DEFAULT, *(rule.name for rule in rules)]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}.groups has the names {names[1:]}", allowed=f"names that differ, none {DEFAULT!r}")

    named = list(named_parameters)
    everything, trainable = _distinct(named)
    if not trainable:
        raise ConfigError("the model has no trainable parameter", remedy="take something out of model.freeze")
    members = _assign(trainable, everything, rules)
    settings = {DEFAULT: (lr, decay if lr else 0.0), **{rule.name: (rule.lr, rule.weight_decay) for rule in rules}}
    if adamw is None:
        return [
            group
            for name in names
            for group in _split(name, *settings[name], members[name], trainable, mults)
            if group.parameters
        ]
    matrices = adamw.others(trainable, named)
    own: dict[str, _Rule | None] = {DEFAULT: None, **{rule.name: rule for rule in rules}}
    found: list[ParamGroup] = []
    for name in names:
        rest = [each for each in members[name] if each not in matrices]
        found += _split(name, *settings[name], [n for n in members[name] if n in matrices], trainable, mults)
        found += [
            replace(group, by_adamw=True)
            for group in _split(f"{name}.{_ADAMW}", *adamw.settings(own[name], lr=lr), rest, trainable, mults)
        ]
    return [group for group in found if group.parameters]


class _AdamW:
    """``optim_wrapper.optimizer.adamw``: what AdamW trains beside an optimizer of whole matrices, and how."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        where = f"{WHERE}.adamw"
        self._lr = _number(spec, "lr", where=where)
        self._weight_decay = _number(spec, "weight_decay", where=where, default=default_weight_decay("AdamW"))
        patterns = spec.get("patterns") or ()
        if isinstance(patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ConfigError(f"{where}.patterns is {patterns!r}", allowed="a list of parts of parameter names")
        self._searches = {pattern: _search(pattern) for pattern in patterns}

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
        decay = self._weight_decay if rule.given_decay is None else rule.given_decay
        return own, decay if own else 0.0


class _Rule:
    """One entry of ``paramwise_cfg.groups``, with its numbers worked out."""

    def __init__(
        self, *, name: str, pattern: str, lr: float, weight_decay: float, given_decay: float | None = None
    ) -> None:
        self.name, self.pattern, self.lr, self.weight_decay = name, pattern, lr, weight_decay
        self.given_decay = given_decay
        """The rule's own weight decay, where it has one."""
        self.matches = _search(pattern)


def _search(pattern: str) -> Callable[[str], bool]:
    """Whether a name has a pattern: as a part of it, or as a regular expression."""
    try:
        search = re.compile(pattern).search
    except re.error:  # not a regular expression: then it is a part of a name
        search = re.compile(re.escape(pattern)).search
    return lambda name: pattern in name or search(name) is not None


def _rule(spec: Any, where: str, *, lr: float, weight_decay: float) -> _Rule:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("pattern"), str) or not spec["pattern"]:
        raise ConfigError(f"{where} is {spec!r}", allowed="dict(pattern='part of a parameter name', lr=...)")
    _check_keys(spec, _RULE_KEYS, where)
    if "lr" in spec and "lr_mult" in spec:
        raise ConfigError(f"{where} has lr and lr_mult", allowed="one of the two")
    own = _number(spec, "lr", where=where, default=lr) * _number(spec, "lr_mult", where=where, default=1.0)
    decay = _number(spec, "weight_decay", where=where, default=weight_decay)
    name = str(spec.get("name", spec["pattern"]))
    return _Rule(
        name=name,
        pattern=spec["pattern"],
        lr=own,
        weight_decay=decay if own else 0.0,
        given_decay=decay if "weight_decay" in spec else None,
    )


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
    if taken:
        raise ConfigError(
            f"pattern {rule.pattern!r} matches only what an earlier pattern took ({_some(taken)})",
            remedy="put the more special pattern first",
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
        parts["" if not part or mults[part] == 1.0 else part].append(name)
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


def _number(spec: Mapping[str, Any], key: str, *, where: str, default: float | None = None) -> float:
    value = spec.get(key, default)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ConfigError(f"{where}.{key} is {value!r}", allowed="a number of at least 0")
    return float(value)


def _check_keys(spec: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in spec:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}", remedy=nearest(str(key), known))
