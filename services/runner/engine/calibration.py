"""Measures what MLX reaches on this machine: `python -m services.runner.engine.calibration`.

Run by `services.runner.adapters.calibration`, in a process of its own that ends with its parent.
Prints one JSON object. Weights are bfloat16, as most models are stored.
"""

import fcntl
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import psutil

_WIDTH = 2048
_MATRIX_BYTES = 2 * _WIDTH * _WIDTH
# 256 MiB: more than most caches hold.
_MOST_MATRICES = 32
_LEAST_MATRICES = 4
# Of the free memory, the part that weights may take.
_MEMORY_PART = 8
_PROMPT_TOKENS = 64
# A machine of several jobs gives each its turn within a tenth of a second: what counts is a whole
# window, and of some windows the least disturbed one.
_WINDOW_SECONDS = 0.15
_WINDOWS = 4


def main() -> None:
    """Measure, one process of this machine at a time."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Nodes of a lab share one machine. The end of this process releases the lock.
    fcntl.flock(_lock_file(), fcntl.LOCK_EX)
    print(json.dumps(measure(_matrix_count(psutil.virtual_memory().available))), flush=True)
    # The thread still reads; there is nothing left to lose.
    os._exit(0)


def measure(matrix_count: int) -> dict[str, int]:
    """Return bytes of weights and multiply-adds per second, over so many matrices of 8 MiB."""
    mx.random.seed(1)
    first = mx.random.uniform(-0.03, 0.03, (_WIDTH, _WIDTH), dtype=mx.bfloat16)
    weights = [first * (1 + i / 1000) for i in range(matrix_count)]
    mx.eval(weights)
    token = mx.random.normal((1, _WIDTH), dtype=mx.bfloat16)
    prompt = mx.random.normal((_PROMPT_TOKENS, _WIDTH), dtype=mx.bfloat16)

    def passed(hidden: mx.array, first: int, count: int) -> None:
        # One after the other, as layers are, on weights that were not used lately.
        for i in range(first, first + count):
            hidden = hidden @ weights[i % matrix_count].T
        mx.eval(hidden)

    matrices = _rate(lambda first, count: passed(token, first, count))
    products = _rate(lambda first, count: passed(prompt, first, count))
    return {
        "weight_bytes_per_second": max(1, int(matrices * _MATRIX_BYTES)),
        "multiply_adds_per_second": max(1, int(products * _PROMPT_TOKENS * _WIDTH**2)),
    }


def _rate(work: Callable[[int, int], None]) -> float:
    """Return how many matrices per second `work(first, count)` gets through, at its best."""
    work(0, 1)
    done, count, best = 0, 1, 0.0
    for _ in range(_WINDOWS):
        began, before = time.perf_counter(), done
        while (passed := time.perf_counter() - began) < _WINDOW_SECONDS:
            started = time.perf_counter()
            work(done, count)
            done += count
            # As many at once as take a good part of a window: a GPU is kept busy by long queues.
            if time.perf_counter() - started < _WINDOW_SECONDS / 16 and count < 256:
                count *= 2
        best = max(best, (done - before) / passed)
    return best


def _matrix_count(free_bytes: int) -> int:
    count = min(_MOST_MATRICES, free_bytes // _MEMORY_PART // _MATRIX_BYTES)
    if count < _LEAST_MATRICES:
        sys.exit(f"only {free_bytes / 1e6:.0f} MB of memory are free")
    return int(count)


def _lock_file() -> int:
    path = Path(tempfile.gettempdir()) / f"shardring-calibration-{os.getuid()}.lock"
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _end_with_parent() -> None:
    # The parent holds the other end of standard input for as long as it lives.
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
