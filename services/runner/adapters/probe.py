"""Finds out where models may be cut, in a process of its own: MLX runs nowhere else."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# The largest models take a second; the rest is for a slow disk to give MLX.
_SECONDS = 60.0
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Probed:
    """The layers of a model, those it may be cut before, and what stands against the others."""

    layer_count: int
    cuts: tuple[int, ...]
    obstacle: str


def probe_cuts(architecture: str, config: Mapping[str, Any]) -> Probed | None:
    """Return where a model with this config.json may be cut; None when that cannot be found out.

    `architecture`: the module of mlx_lm.models that implements it. Blocks, up to a minute; one at a
    time, as each takes a core.
    """
    with _ONE_AT_A_TIME:
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "services.runner.engine.probe", architecture],
                input=json.dumps(config).encode(),
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.warning("Where %s may be cut is not known: %s", architecture, error)
            return None
    try:
        said = json.loads(ran.stdout)
        return Probed(said["layer_count"], tuple(said["cuts"]), said["obstacle"])
    except (ValueError, KeyError, TypeError):
        words = ran.stderr.decode(errors="replace").strip().splitlines()
        why = words[-1] if words else f"its process ended with status {ran.returncode}"
        logger.warning("Where %s may be cut is not known: %s", architecture, why)
        return None
