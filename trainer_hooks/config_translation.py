"""Aliases in a config, replaced by our keys before anything else looks at it."""

from __future__ import annotations

import dataclasses
import operator
import typing
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import MISSING, OmegaConf

from rollout.errors import ConfigError
from trainer_hooks.config_aliases import ALIASES, MAX_NEW_TOKENS, Alias, alias_named
from trainer_hooks.config_loss_kinds import LOSS_KIND, loss_kind_settings
from trainer_hooks.config_values import ABSENT, copied, joined, leaves, lookup, remove, store
from trainer_hooks.losses.config import KINDS

# Where run_hydra_job puts the aliases of the command line, which override what YAML says.
COMMAND_LINE_KEY = "_aliases_"
# The config group whose choice on the command line chooses a kind of loss.
LOSS_KIND_GROUP = LOSS_KIND.partition(".")[0]
# Where a config says how it deviates from a kind, by its name: left behind with that kind.
WITH_KIND = f"{LOSS_KIND_GROUP}.with_kind"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """An alias as it was given, below `path`, where the config is a `kind`."""

    alias: Alias
    name: str
    value: Any
    path: str
    kind: type
    is_command_line: bool

    def __str__(self) -> str:
        return f"{joined(self.path, self.name)}={self.value} ({self.alias.system})"


class AliasTranslation:
    """`values`: nested mappings with our keys only; `notes`: a line per alias, for people.

    An alias may stand at the top or inside a part of the config; our own keys win over aliases of
    the same name. One given on the command line overrides YAML, but not what is `overridden`, our
    keys on the command line: two different values for one setting raise ConfigError.
    A kind of policy loss brings all that belongs to it: what YAML leaves out, and, where the
    command line names the kind, what YAML says of another one. What stands under a kind's name in
    `algorithm.with_kind` goes before what the kind brings, where YAML or a group chooses that kind.
    """

    def __init__(
        self, kind: type, values: Mapping[str, Any], overridden: Collection[str] = ()
    ) -> None:
        self.values = copied(values)
        self._kind = kind
        self._overridden = overridden
        self._on_command_line = set(overridden)  # our keys, by whatever name they were given
        self._sources: dict[str, tuple[str, bool]] = {}  # our key -> what set it, and if weakly
        self._given = self._take_given()
        self._check_caps()
        for alias in ALIASES:
            for given in self._given:
                if given.alias is alias:
                    self._translate(given)
        self._complete_loss_kind()
        self.notes = [
            f"{source} is {key}={lookup(self.values, key)}"
            for key, (source, _) in self._sources.items()
        ]

    def _take_given(self) -> list[_Given]:
        """All aliases, removed from `values`; those of the command line replace their like."""
        command_line = self.values.pop(COMMAND_LINE_KEY, {})
        found = {**_take_aliases(self.values, self._kind, "", is_command_line=False)}
        found |= _take_aliases(command_line, self._kind, "", is_command_line=True)
        if unknown := leaves(command_line):
            raise ConfigError(f"{unknown[0]} is no alias of a config key")
        return list(found.values())

    def _check_caps(self) -> None:
        """Refuse an `epsilon_high` in the loss beside TRL's cispo: both have a key of that name."""
        for given in self._given:
            if (given.name, given.value) != ("loss_type", "cispo"):
                continue
            key = joined(given.path, "epsilon_high")
            is_ours = is_key(given.kind, "epsilon_high")
            is_beside = not given.is_command_line or key in self._overridden
            if is_ours and is_beside and lookup(self.values, key) not in (ABSENT, None):
                raise ConfigError(
                    f"{key}={lookup(self.values, key)} beside {given}: here it is the cap less 1, "
                    "TRL's is the cap itself; give kind=cispo in place of loss_type, and for a cap "
                    "of 5 epsilon_high=4"
                )

    def _translate(self, given: _Given) -> None:
        try:
            converted = given.alias.convert(given.value, lambda name: self._read(name, given))
        except ConfigError as error:
            raise ConfigError(f"{given}: {error}") from error
        for target, value in converted.items():
            is_weak = target in given.alias.weak_targets
            key = self._find_key(target, given) if is_weak else self._key_of(target, given)
            if key is not None:
                self._set(key, value, given, is_weak)

    def _set(self, key: str, value: Any, given: _Given, is_weak: bool) -> None:
        source, is_source_weak = self._sources.get(key, (None, False))
        present = lookup(self.values, key)
        if source is None and (not given.is_command_line or self._is_overridden(key)):
            source = None if present is ABSENT else f"{key}={present}"
        if source is not None and not is_source_weak:
            if present == value and given.is_command_line:
                self._on_command_line.add(key)
            elif present != value and not is_weak:
                remedy = f", or choose the group: algorithm={value}" if key == LOSS_KIND else ""
                raise ConfigError(
                    f"{given} and {source} name one setting; give one of them{remedy}"
                )
            return
        if source is not None and is_weak:
            return
        self._sources[key] = (str(given), is_weak)
        if given.is_command_line:
            self._on_command_line.add(key)
        store(self.values, key, value)

    def _is_overridden(self, key: str) -> bool:
        group = LOSS_KIND_GROUP if key == LOSS_KIND else key
        return key in self._overridden or group in self._overridden

    def _take_deviations(self) -> dict[str, dict[str, Any]]:
        """What `with_kind` says of each kind of loss, by our whole keys; removed from `values`."""
        by_kind = lookup(self.values, WITH_KIND)
        if by_kind is ABSENT or not is_key(self._kind, LOSS_KIND):
            return {}
        remove(self.values, WITH_KIND)
        if not isinstance(by_kind, dict) or not all(isinstance(x, dict) for x in by_kind.values()):
            raise ConfigError(f"{WITH_KIND}={by_kind} must hold settings by kind of loss")
        if unknown := set(by_kind) - set(KINDS):
            raise ConfigError(f"{WITH_KIND}.{min(unknown)} is no kind of loss: {', '.join(KINDS)}")
        return {
            kind: {f"{LOSS_KIND_GROUP}.{key}": lookup(part, key) for key in leaves(part)}
            for kind, part in by_kind.items()
        }

    def _complete_loss_kind(self) -> None:
        """Set what belongs to the kind of loss, if this config has one, and nobody else has set."""
        deviations = self._take_deviations()
        if not is_key(self._kind, LOSS_KIND) or self._value(LOSS_KIND) not in KINDS:
            return
        kind, is_named = self._value(LOSS_KIND), LOSS_KIND in self._on_command_line
        if not is_named:
            for key, value in deviations.get(kind, {}).items():
                if lookup(self.values, key) in (ABSENT, MISSING):
                    store(self.values, key, value)
        is_given = lookup(self.values, LOSS_KIND) is not ABSENT
        source, _ = self._sources.get(LOSS_KIND, (f"{LOSS_KIND}={kind}", False))
        for key, value in loss_kind_settings(kind, self._value(MAX_NEW_TOKENS)).items():
            present = lookup(self.values, key)
            is_set = present == value or (present is ABSENT and value is None)
            if is_set or key in self._on_command_line or not is_key(self._kind, key):
                continue
            # A default of the config's own counts only beside a kind that is a default too.
            has_default = not is_given and default_of(self._kind, key) is not None
            if is_named or (present in (ABSENT, None, MISSING) and not has_default):
                store(self.values, key, value)
                if is_named:
                    self._sources[key] = (source, False)

    def _read(self, name: str, given: _Given) -> Any:
        """What a computed alias needs: another alias that was given, or one of our settings."""
        if alias_named(name) is not None:
            return next((other.value for other in self._given if other.name == name), None)
        key = self._key_of(name, given)
        value = self._value(key)
        if value is None:
            raise ConfigError(f"it needs {key}, which is not given")
        return value

    def _value(self, key: str) -> Any:
        """Our setting as it stands, its field's default if it is not given; None without one."""
        value = lookup(self.values, key)
        if isinstance(value, str):  # an interpolation
            value = OmegaConf.select(OmegaConf.create(self.values), key)
        return default_of(self._kind, key) if value is ABSENT else value

    def _key_of(self, target: str, given: _Given) -> str:
        """Our whole key for a target. Raises ConfigError if the config has none there."""
        key = self._find_key(target, given)
        if key is not None:
            return key
        if is_key(self._kind, target):
            name = joined(given.path, given.name)
            system = given.alias.system
            raise ConfigError(
                f"unknown config key {name}; {given.name} ({system}) is {target} here, give that"
            )
        raise ConfigError(f"{given} is {target} here, which this config does not have")

    def _find_key(self, target: str, given: _Given) -> str | None:
        """The longest tail of a target that exists where the alias stands, as a whole key."""
        parts = target.split(".")
        for start in range(len(parts)):
            key = ".".join(parts[start:])
            if is_key(given.kind, key):
                return joined(given.path, key)
        return None


def init_field_types(kind: type) -> dict[str, Any]:
    """Names of the fields a dataclass is made from, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def is_key(kind: Any, key: str) -> bool:
    """Whether a config of `kind` has `key`; whatever is below a field of another type is its."""
    for name in key.split("."):
        if not dataclasses.is_dataclass(kind):
            return True
        field_types = init_field_types(typing.cast(type, kind))
        if name not in field_types:
            return False
        kind = field_types[name]
    return True


def default_of(kind: Any, key: str) -> Any:
    """What `key` is in a config of `kind` that does not give it; None if it has no default."""
    name, _, rest = key.partition(".")
    found = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    for field in found:
        if field.name == name and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif field.name == name and field.default is not dataclasses.MISSING:
            value = field.default
        elif field.name == name and rest:
            return default_of(init_field_types(typing.cast(type, kind))[name], rest)
        else:
            continue
        return operator.attrgetter(rest)(value) if rest else value
    return None


def is_alias(kind: Any, key: str) -> bool:
    """Whether `key`, which a config of `kind` does not have, is an alias, at the top or inside."""
    while dataclasses.is_dataclass(kind) and not is_key(kind, key):
        if alias_named(key) is not None:
            return True
        name, _, key = key.partition(".")
        kind = init_field_types(typing.cast(type, kind)).get(name)
    return False


def _take_aliases(
    values: dict[str, Any], kind: type, path: str, *, is_command_line: bool
) -> dict[str, _Given]:
    """Remove the aliases from `values`, a config of `kind`; by their whole names."""
    found = {}
    for alias in ALIASES:
        for name in alias.names:
            if is_key(kind, name) or (value := lookup(values, name)) is ABSENT:
                continue
            remove(values, name)
            found[joined(path, name)] = _Given(
                alias=alias,
                name=name,
                value=value,
                path=path,
                kind=kind,
                is_command_line=is_command_line,
            )
    for name, part in init_field_types(kind).items():
        if dataclasses.is_dataclass(part) and isinstance(values.get(name), dict):
            inner = typing.cast(type, part)
            found |= _take_aliases(
                values[name], inner, joined(path, name), is_command_line=is_command_line
            )
    return found
