"""Names -> classes: a wrong name or argument is an error that names the right one."""

import logging

import mmengine.hooks
import pytest
from mmengine.registry import Registry

from unigen_ds.config.registry import HOOKS, build, registered_name, resolve
from unigen_ds.core.errors import ConfigError
from unigen_ds.hooks.log.logger import LoggerHook

THINGS = Registry("test_thing")


@THINGS.register_module()
class Window:
    def __init__(self, *, size: int, stride: int = 1) -> None:
        if size == 13:
            raise TypeError("thirteen is not a size we like")
        self.size, self.stride = size, stride


class OwnLogger(LoggerHook):
    """A user's own, unregistered."""


def test_builds_by_name_and_by_class_with_extra_arguments() -> None:
    assert build(THINGS, {"type": "Window", "size": 4}, where="w", stride=2).stride == 2
    assert build(THINGS, {"type": Window, "size": 4}, where="w").size == 4
    assert resolve(THINGS, {"type": "Window", "size": 4}, where="w") == (Window, {"size": 4})


@pytest.mark.parametrize(
    "kind", [mmengine.hooks.LoggerHook, "mmengine.hooks.LoggerHook", "unigen_ds.hooks.log.logger.LoggerHook"]
)
def test_a_class_of_mmengine_and_a_path_stand_for_the_class_of_that_name(
    kind: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="unigen_ds"):
        assert resolve(HOOKS, {"type": kind, "interval": 3}, where="w") == (LoggerHook, {"interval": 3})
    assert "is read as the class of that name in unigen_ds" in caplog.text
    assert registered_name(kind) == registered_name(LoggerHook) == "LoggerHook"


def test_any_other_class_is_itself() -> None:
    assert resolve(HOOKS, {"type": OwnLogger}, where="w")[0] is OwnLogger and registered_name(OwnLogger) is None
    assert registered_name("mmengine.hooks.SyncBuffersHook") is registered_name("LoggerHook") is None
    with pytest.raises(ConfigError, match=r"type is 'mmengine\.hooks\.SyncBuffersHook'"):
        resolve(HOOKS, {"type": "mmengine.hooks.SyncBuffersHook"}, where="w")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "Windw"}, r"packing.type is 'Windw'.*did you mean 'Window'"),
        ({"size": 3}, "packing is"),
        ("Window", "packing is 'Window'"),
        ({"type": "Window", "size": 3, "strid": 2}, "no key 'strid'.*did you mean 'stride'"),
        ({"type": "Window"}, "packing cannot be built.*size"),
        ({"type": 3}, "packing.type is 3"),
        ({"type": "Window", "size": 3, "stride": 2}, "packing.stride.*cannot be given"),
    ],
)
def test_errors(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(THINGS, spec, where="packing", stride=9)  # type: ignore[arg-type]


def test_a_type_error_inside_the_class_is_not_hidden() -> None:
    with pytest.raises(TypeError, match="thirteen"):
        build(THINGS, {"type": "Window", "size": 13}, where="w")
