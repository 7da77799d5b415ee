"""Registry of model families.

A family is one file with a `Family` in it.  `FAMILIES` has weft's own, the files of
`weft.models.families`, which are imported when they are used.  A recipe names a user's family as
``model.kind = "package.module:attribute"``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.models.family import Family

__all__ = ["FAMILIES", "Family", "load_family"]


class _Families(Mapping[str, Family]):
    """The families of weft by name, llama first."""

    @cached_property
    def names(self) -> list[str]:
        package = importlib.import_module("weft.models.families")
        names = {module.name for module in pkgutil.iter_modules(package.__path__)}
        return ["llama", *sorted(names - {"llama"})]

    def __getitem__(self, kind: str) -> Family:
        if kind not in self.names:
            raise KeyError(kind)
        family: Family = importlib.import_module(f"weft.models.families.{kind}").FAMILY
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


FAMILIES: Mapping[str, Family] = _Families()


def load_family(kind: str) -> Family:
    """Return a family by name, or import a user's ``package.module:attribute``.

    Raises:
        InvalidConfig: with an error of ``model.kind``.
    """
    if kind in FAMILIES:
        return FAMILIES[kind]
    module_name, colon, attribute = kind.partition(":")
    if not colon:
        rule = "is not a known model family, nor of the form package.module:attribute"
        raise _invalid_kind(kind, rule, suggest(kind, FAMILIES))
    if not all(name.isidentifier() for name in module_name.split(".")):
        raise _invalid_kind(
            kind, "is not a module name before the colon", "use package.module:attribute"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module can raise any exception
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        is_missing = isinstance(error, ModuleNotFoundError)
        remedy = "add its directory to PYTHONPATH" if is_missing else "fix the module"
        raise _invalid_kind(kind, rule, remedy) from error
    family = getattr(module, attribute, None)
    if not isinstance(family, Family):
        families = [name for name, value in vars(module).items() if isinstance(value, Family)]
        is_missing = attribute not in vars(module)
        rule = (
            f"does not exist: {module_name} has no {attribute!r}"
            if is_missing
            else "is not a weft.models.Family"
        )
        remedy = suggest(attribute, families) if families else "make one: weft.models.Family(...)"
        raise _invalid_kind(kind, rule, remedy)
    return family


def _invalid_kind(kind: str, rule: str, remedy: str) -> InvalidConfig:
    return InvalidConfig([ConfigError("model.kind", kind, rule, remedy)])
