"""Whether mlx-lm implements an architecture, can split its layers, and where it may be cut.

Found out without importing it (or MLX); where it may be cut, by a program that the node brings.

The same decision as mlx_lm.utils._get_classes: its two tables of renamed architectures are read
from its source, then models/<type>.py must define Model and ModelArgs. On a node without mlx-lm
nothing is supported.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from services.downloads.domain.records import Cuts

_PARSING = threading.Lock()
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")


class Probed(Protocol):
    """What a probe found: how many layers the engine makes of a model, before which of them it may
    be cut, and what stands against the others."""

    @property
    def layer_count(self) -> int:
        """Layers."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ascending."""

    @property
    def obstacle(self) -> str:
        """Empty when there is none."""


# Given an architecture's module of mlx-lm, and config.json; None: it cannot be found out. Blocks.
Probe = Callable[[str, Mapping[str, Any]], Probed | None]


def no_probe(_architecture: str, _config: Mapping[str, Any]) -> None:
    """Find out nothing."""


class EngineSupport:
    """Reads mlx-lm's source on first use, and each architecture's at most once; probes each
    config.json at most once."""

    def __init__(self, probe: Probe = no_probe) -> None:
        self._probe = probe
        self._probed: dict[bytes, Probed] = {}
        self._defined: dict[str, bool] = {}
        self._sharded: dict[str, bool] = {}

    def supports(self, config: Mapping[str, Any]) -> bool:
        """True when mlx-lm runs a model with this config.json without code of its own."""
        model_type = config.get("model_type")
        if self._folder is None or not isinstance(model_type, str):
            return False
        # mlx-lm then runs that file of the repository instead, which Shardring never fetches.
        if config.get("model_file") is not None:
            return False
        name = self._renamed(model_type, config.get("architectures") or ())
        if name not in self._defined:
            self._defined[name] = _defines_model(self._folder / "models", name)
        return self._defined[name]

    def supports_tensor(self, config: Mapping[str, Any]) -> bool:
        """True when mlx-lm can split each layer of such a model over several ranks: when its
        architecture's Model has a method `shard`, of its own or inherited."""
        if not self.supports(config) or self._folder is None:
            return False
        name = self._renamed(config["model_type"], config.get("architectures") or ())
        if name not in self._sharded:
            self._sharded[name] = _has_method(self._folder / "models", name, "Model", "shard")
        return self._sharded[name]

    def cuts(self, config: Mapping[str, Any], layer_count: int) -> Cuts | None:
        """Return where such a model may be cut; None when that is not known. Blocks."""
        if not self.supports(config):
            return None
        key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).digest()
        if key not in self._probed:
            name = self._renamed(config["model_type"], config.get("architectures") or ())
            if (probed := self._probe(name, config)) is None:
                return None
            self._probed[key] = probed
        probed = self._probed[key]
        # Of layers that the files number otherwise nothing is known.
        return Cuts(probed.cuts, probed.obstacle) if probed.layer_count == layer_count else None

    @cached_property
    def version(self) -> str:
        """Of mlx-lm; empty on a node without it."""
        try:
            return importlib.metadata.version("mlx-lm")
        except importlib.metadata.PackageNotFoundError:
            return ""

    def _renamed(self, model_type: str, architectures: Any) -> str:
        types, pairs = self._tables
        if isinstance(architectures, str):
            architectures = (architectures,)
        for architecture in architectures if isinstance(architectures, list | tuple) else ():
            if (
                isinstance(architecture, str)
                and (found := pairs.get((model_type, architecture))) is not None
            ):
                return found
        return types.get(model_type, model_type)

    @cached_property
    def _folder(self) -> Path | None:
        # The top-level package's spec is found without running any of its code.
        spec = importlib.util.find_spec("mlx_lm")
        places = spec.submodule_search_locations if spec else None
        return Path(next(iter(places))) if places else None

    @cached_property
    def _tables(self) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
        if self._folder is None:
            return {}, {}
        tables: dict[str, Any] = {}
        for statement in _statements(self._folder / "utils.py"):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"):
                    tables[name] = ast.literal_eval(statement.value)
        return tables.get("MODEL_REMAPPING", {}), tables.get("MODEL_ARCHITECTURE_REMAPPING", {})


def _statements(path: Path) -> list[ast.stmt]:
    """Return a module's top-level statements."""
    # CPython 3.11 counts the depth of all threads' parsing together, and fails when two overlap:
    # https://github.com/python/cpython/issues/106905.
    with _PARSING:
        return ast.parse(path.read_text()).body


def _defines_model(models: Path, name: str) -> bool:
    path = models / f"{name}.py"
    if not _MODULE.fullmatch(name) or not path.is_file():
        return False
    names: set[str] = set()
    for statement in _statements(path):
        if isinstance(statement, ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Try) and _exits_without_library(statement):
            return False
    return {"Model", "ModelArgs"} <= names


def _has_method(models: Path, module: str, class_name: str, method: str) -> bool:
    """True when a class of a module, or one of those it is made from there, has a method."""
    path = models / f"{module}.py"
    if not _MODULE.fullmatch(module) or not path.is_file():
        return False
    classes: dict[str, ast.ClassDef] = {}
    imported: dict[str, tuple[str, str]] = {}
    for statement in _statements(path):
        if isinstance(statement, ast.ClassDef):
            classes[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom) and statement.level == 1:
            for alias in statement.names:
                imported[alias.asname or alias.name] = (statement.module or alias.name, alias.name)
    if (definition := classes.get(class_name)) is None:
        source, original = imported.get(class_name, ("", ""))
        return _has_method(models, source, original, method)
    if any(isinstance(part, ast.FunctionDef) and part.name == method for part in definition.body):
        return True
    for base in definition.bases:
        match base:
            case ast.Name(name) if name in imported or (name in classes and name != class_name):
                if _has_method(models, module, name, method):
                    return True
            case ast.Attribute(ast.Name(holder), name) if holder in imported:
                if _has_method(models, imported[holder][0], name, method):
                    return True
    return False


def _exits_without_library(statement: ast.Try) -> bool:
    """True for `try: import x, except ImportError: sys.exit()` where x is not installed."""
    exits = any("exit" in ast.unparse(handler) for handler in statement.handlers)
    imported = [
        alias.name.partition(".")[0]
        for inner in statement.body
        if isinstance(inner, ast.Import)
        for alias in inner.names
    ]
    return exits and any(importlib.util.find_spec(name) is None for name in imported)
