"""One process of `tests.conformance.exact`: the whole of a model, or one rank of a ring.

    python -m tests.conformance.exact_rank            the whole, by mlx-lm alone
    python -m tests.conformance.exact_rank RANK HOSTS a rank; HOSTS is its JSON host list

Reads lines of JSON (see `Task`) and answers each with one line: {"logits": FILE}, {"lanes": WHAT}
from rank 0 of stages, {} from ranks between, or {"refused": WHY}. Ends at the first fault, as its
ring is then broken.
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
from services.runner.domain.steps import Command
from services.runner.engine.follower import Follower
from services.runner.engine.head import details
from services.runner.engine.line import Line, Pipeline, Split
from services.runner.engine.loader import load_stage
from services.runner.engine.ring import Op, Ring
from services.runner.engine.spans import SequenceSpans
from services.runner.engine.stage import StagesUnsupported, allowed_cuts
from services.runner.engine.tensor import TensorUnsupported, load_tensor
from services.runner.engine.work import Model, Work

PROMPT = [5, 9, 2, 7, 11, 3, 8]
STEPS = 16
# Shorter than the first, so that the two make a batch with padding.
OTHER_PROMPT = [4, 1, 6]
LANE_STEPS = 8
# What a rank says of two sequences in one lane.
SAME, OTHER, APART = "same", "other", "apart"


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


@dataclass(frozen=True)
class Made:
    """A model's number of layers, those it may be cut before, and whether mlx-lm can split each."""

    layer_count: int
    cuts: list[int]
    can_split: bool


def make_model(config: dict[str, Any], folder: Path) -> Made:
    """Write a model of this configuration with random weights, quantized where it says so."""
    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    if how := config.get("quantization"):
        nn.quantize(model, **how)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model.save_weights(str(folder / "model.safetensors"))
    return Made(len(model.layers), allowed_cuts(model)[0], hasattr(model, "shard"))


class _Recorded:
    """A rank's model that keeps the logits of every sampling step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.can_batch = model.can_batch
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
    work = Work(
        recorded,
        hands_on=not task.tensor and not ring.is_last,
        chooses=ring.rank == 0 if task.tensor else ring.is_last,
        spans=SequenceSpans(ring.rank),
    )
    work.checking = True
    if ring.rank == 0:
        line = Split(work, ring) if task.tensor else Pipeline(work, ring)
        (tokens,) = _generate(line, PROMPT)
        if not task.tensor:
            return {"lanes": _in_one_lane(line, tokens) if recorded.can_batch else APART}
        mx.save_safetensors(task.logits, {"tokens": mx.array(tokens)})
        return {"logits": task.logits}
    follower = Follower(work, ring, lambda _: None, is_split=task.tensor)
    # Each generation ends with tidying up.
    generations = 1 if task.tensor or not recorded.can_batch else 3
    while generations:
        ring.wait()
        generations -= follower.step() is Op.TIDY
    return _written(recorded.logits, task) if ring.is_last and not task.tensor else {}


def _generate(line: Line, *prompts: list[int], steps: int = STEPS + 1) -> list[list[int]]:
    """Have prompts and greedy steps of them all in one lane computed; return the tokens of each."""
    for sequence, prompt in enumerate(prompts):
        opened = [Command.OPEN, sequence, 0, 0, details(Sampling(), prompt, None, {})]
        line.prefill([opened], sequence, prompt[:-1])
        line.take()
    last = [prompt[-1] for prompt in prompts]
    commands = [[Command.JOIN, sequence, 0] for sequence in range(len(prompts))]
    chosen = []
    for _ in range(steps):
        line.decode(commands, 0, last, len(prompts), len(prompts))
        commands, last = [], line.take()
        chosen.append(last)
    line.tidy([[Command.LEAVE, sequence, 0, 0] for sequence in range(len(prompts))])
    return [list(tokens) for tokens in zip(*chosen, strict=True)]


def _in_one_lane(line: Line, tokens: list[int]) -> str:
    """Say whether two sequences in one lane get the tokens that each gets alone; `tokens` are those
    of the first."""
    (other,) = _generate(line, OTHER_PROMPT, steps=LANE_STEPS)
    both = _generate(line, PROMPT, OTHER_PROMPT, steps=LANE_STEPS)
    return SAME if both == [tokens[:LANE_STEPS], other] else OTHER


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
