"""The parameters that the engine was built with. It has sharded them, and has optimizer states of those that are
trained, so a hook that freezes, adds or replaces one would not be obeyed: weight decay moves a weight without gradient,
and a new one is neither trained nor saved. Such a hook is refused by name.
"""

from __future__ import annotations

from unigen_ds.backends.base import Backend
from unigen_ds.core.errors import ConfigError
from unigen_ds.hooks.base import PRIORITY, Hook

_RARE = ("before_run", "after_load_checkpoint", "before_train", "before_train_epoch", "after_train_epoch")
"""Points after which the modules are walked through. After an update those alone that had a parameter are looked at,
and after all others flags are compared."""


class Parameters:
    """As they are when a run begins."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._built = backend.named_parameters()
        self._held = [*self._built.values()]
        self._trained = [parameter.requires_grad for parameter in self._held]
        owners = (module._parameters for module in backend.model.modules())
        self._owners = [(owner, name, p) for owner in owners for name, p in owner.items()]

    def check(self, hook: Hook, point: str) -> None:
        """Raise ``ConfigError`` where ``hook`` has changed them. Called after each of its methods."""
        if hook.name in PRIORITY and type(hook).__module__.startswith("unigen_ds."):
            return
        changes = []
        if [parameter.requires_grad for parameter in self._held] != self._trained:
            flags = zip(self._built.items(), self._trained, strict=True)
            changes = [f"sets requires_grad={not was} of {name}" for (name, p), was in flags if p.requires_grad != was]
        if point in _RARE or (point == "after_update" and self._are_others()):
            now, built = self._backend.named_parameters(), self._built
            changes += [f"adds {name}" for name in now if name not in built]
            changes += [f"removes {name}" for name in built if name not in now]
            changes += [f"replaces {name}" for name, p in now.items() if built.get(name, p) is not p]
        if changes:
            more = f" (and {len(changes) - 1} more changes)" if len(changes) > 1 else ""
            found_late = point == "after_update" and not changes[0].startswith("sets ")
            others = " (or a hook before it in this update)" if found_late else ""
            raise ConfigError(
                f"{hook.name or type(hook).__name__}.{point}{others} {changes[0]}{more}, after the engine was built",
                allowed="hooks that leave the model's parameters as they are",
                remedy="model.freeze, or optim_wrapper.paramwise_cfg.groups=[dict(pattern=..., lr=0)], freezes; a model"
                " with other parameters is a class of your own (docs/extending.md)",
            )

    def _are_others(self) -> bool:
        """Whether a module has another object, which may also be one that the engine has gathered."""
        return any(owner.get(name) is not parameter for owner, name, parameter in self._owners)
