"""One process of `tests.conformance.exact`: the whole of a model, or one rank of a ring.

    python -m tests.conformance.exact_rank            the whole, by mlx-lm alone
    python -m tests.conformance.exact_rank RANK HOSTS a rank; HOSTS is its JSON host list

Reads lines of JSON (see `Task`) and answers each with one line: {"logits": FILE}, {} from a rank
that samples nothing, or {"refused": WHY}. Ends at the first fault, as its ring is then broken.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes, load_model

from services.runner.domain.request import Sampling
from services.runner.domain.schedule import Command
from services.runner.engine.follower import Follower
from services.runner.engine.head import details
from services.runner.engine.line import Line, Pipeline, Split
from services.runner.engine.loader import load_stage
from services.runner.engine.ring import Ring
from services.runner.engine.spans import SequenceSpans
from services.runner.engine.stage import StagesUnsupported
from services.runner.engine.tensor import TensorUnsupported, load_tensor
from services.runner.engine.work import Model, Work

PROMPT = [5, 9, 2, 7, 11, 3, 8]
STEPS = 16


_REFUSALS = (
    StagesUnsupported,
    TensorUnsupported,
    FloatingPointError,
    TypeError,
    ValueError,
    AttributeError,
)


@dataclass(frozen=True)
class Task:
    """A model folder to compute with, the layers of this rank, and where to write logits.

    `tensor`: this rank's part of every layer instead; the head then writes the tokens.
    """

    folder: str
    start: int
    end: int
    logits: str
    tensor: bool = False

    def to_json(self) -> str:
        """Return the task as one line."""
        return json.dumps(asdict(self))


def make_model(config: dict[str, Any], folder: Path) -> tuple[int, bool]:
    """Write a model of this configuration with random weights; return its number of layers, and
    whether mlx-lm can split them."""
    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model.save_weights(str(folder / "model.safetensors"))
    return len(model.layers), hasattr(model, "shard")


class _Recorded:
    """A rank's model that keeps the logits of every sampling step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.logits: list[mx.array] = []

    def make_cache(self, max_token_count: int | None = None) -> list[Any]:
        return self._model.make_cache(max_token_count)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        result = self._model(inputs, cache)
        if inputs.shape[1] == 1:
            self.logits.append(result[:, -1, :])
        return result


def run_whole(task: Task) -> dict[str, Any]:
    """Compute with mlx-lm's own generation, in one process."""
    model, _ = load_model(Path(task.folder))
    recorded: list[mx.array] = []
    original = type(model)

    def call(self: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        result: mx.array = original.__call__(self, tokens, *args, **kwargs)
        if tokens.shape[1] == 1:
            recorded.append(result[:, -1, :])
        return result

    model.__class__ = type(original.__name__, (original,), {"__call__": call})
    list(generate_step(mx.array(PROMPT), model, max_tokens=STEPS + 1))
    return _written(recorded, task)


def run_rank(task: Task, ring: Ring) -> dict[str, Any]:
    """Compute one stage, or one part of every layer, as the product's ranks do."""
    model: Model
    if task.tensor:
        model = load_tensor(Path(task.folder), ring)
    else:
        model = load_stage(Path(task.folder), task.start, task.end)
    recorded = _Recorded(model)
    chooses = task.tensor or ring.is_last
    work = Work(recorded, chooses=chooses, spans=SequenceSpans(ring.rank))
    work.checking = True
    if ring.rank == 0:
        line = Split(work, ring) if task.tensor else Pipeline(work, ring)
        tokens = _generate(line)
        if not task.tensor:
            return {}
        mx.save_safetensors(task.logits, {"tokens": mx.array(tokens)})
        return {"logits": task.logits}
    follower = Follower(work, ring, lambda _: None, is_split=task.tensor)
    began = False
    while not began or work.sequence_count:
        ring.wait()
        follower.step()
        began = True
    return _written(recorded.logits, task) if ring.is_last and not task.tensor else {}


def _generate(line: Line) -> list[int]:
    """Have a prompt and greedy steps computed; return the tokens."""
    opened = [Command.OPEN, 0, 0, 0, details(Sampling(), PROMPT, None, {})]
    line.prefill([opened], 0, PROMPT[:-1])
    line.take()
    tokens, commands = PROMPT[-1:], [[Command.JOIN, 0, 0]]
    for _ in range(STEPS + 1):
        line.decode(commands, 0, tokens[-1:], 1, 1)
        commands = []
        tokens += line.take()
    line.tidy([[Command.LEAVE, 0, 0, 0]])
    return tokens[1:]


def _written(logits: list[mx.array], task: Task) -> dict[str, Any]:
    # mlx-lm computes one step more than it is asked for, ahead of its reader.
    kept = mx.concatenate(logits[: STEPS + 1])
    mx.save_safetensors(task.logits, {"logits": kept})
    return {"logits": task.logits}


def _tasks() -> Iterator[Task]:
    for line in sys.stdin:
        yield Task(**json.loads(line))


def main() -> None:
    """Answer tasks until the input ends or one fails."""
    mx.set_default_device(mx.cpu)
    ring = Ring(int(sys.argv[1]), tuple(json.loads(sys.argv[2]))) if len(sys.argv) > 1 else None
    for task in _tasks():
        try:
            answer = run_whole(task) if ring is None else run_rank(task, ring)
        except _REFUSALS as why:
            print(json.dumps({"refused": f"{type(why).__name__}: {why}"}), flush=True)
            sys.exit(1)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
