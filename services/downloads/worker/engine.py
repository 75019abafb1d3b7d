"""Whether mlx-lm implements an architecture, found out without importing it (or MLX).

The same decision as mlx_lm.utils._get_classes: its two tables of renamed architectures are read
from its source, then models/<type>.py must define Model and ModelArgs. On a node without mlx-lm
nothing is supported.
"""

import ast
import importlib.util
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")


class EngineSupport:
    """Reads mlx-lm's source on first use, and each architecture's at most once."""

    def __init__(self) -> None:
        self._defined: dict[str, bool] = {}

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
        for statement in ast.parse((self._folder / "utils.py").read_text()).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"):
                    tables[name] = ast.literal_eval(statement.value)
        return tables.get("MODEL_REMAPPING", {}), tables.get("MODEL_ARCHITECTURE_REMAPPING", {})


def _defines_model(models: Path, name: str) -> bool:
    path = models / f"{name}.py"
    if not _MODULE.fullmatch(name) or not path.is_file():
        return False
    names: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Try) and _exits_without_library(statement):
            return False
    return {"Model", "ModelArgs"} <= names


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
