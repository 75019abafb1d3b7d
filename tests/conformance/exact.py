"""Compare every architecture of a file over real rings with mlx-lm in one process.

    python -m tests.conformance.exact CONFIGS [NAME ...]

CONFIGS has the format of tests/vectors/architectures.json. Each model gets random weights and is
cut into 2 and 3 stages where it may be cut; the logits of a prompt and 16 greedy steps are compared
bit by bit, and two sequences in one lane must get the tokens that each gets alone. A cut where it
may not be must be refused. Where mlx-lm can split layers, 2 and 4 tensor ranks must choose the same
tokens. Prints a line for each architecture (exact, refused and why, or the largest difference) and
a count; exits with 1 when any differs.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.conformance.exact_rank import APART, OTHER, Made, Task, make_model
from tests.contract.runner_lab import free_ports

RING_SIZES = (2, 3)
TENSOR_SIZES = (2, 4)
_TASK_SECONDS = 300.0
# How what is said begins where something went wrong that is no refusal.
_FAULTS = ("a rank died", "logits", "lanes")


@dataclass
class Rank:
    """One process."""

    process: asyncio.subprocess.Process

    @staticmethod
    async def start(*arguments: str) -> "Rank":
        """Start a process."""
        return Rank(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.conformance.exact_rank", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        )

    async def run(self, task: Task) -> dict[str, Any]:
        """Return the answer to a task; that it ended counts as one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(ConnectionError):
            self.process.stdin.write(task.to_json().encode() + b"\n")
            await self.process.stdin.drain()
        line = await self.process.stdout.readline()
        return dict(json.loads(line)) if line else {"lost": True}

    async def stop(self) -> None:
        """End the process."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@dataclass
class RingOf:
    """The ranks of a ring of one size; formed anew after a fault."""

    size: int
    ranks: list[Rank] = field(default_factory=list)

    async def run(self, tasks: list[Task]) -> list[dict[str, Any]]:
        """Return the answers of all ranks."""
        if not self.ranks:
            ports = free_ports(self.size)
            hosts = json.dumps([f"127.0.0.1:{port}" for port in ports])
            self.ranks = [await Rank.start(str(rank), hosts) for rank in range(self.size)]
        running = [
            asyncio.create_task(rank.run(task))
            for rank, task in zip(self.ranks, tasks, strict=True)
        ]
        answers = []
        try:
            async with asyncio.timeout(_TASK_SECONDS):
                for answered in asyncio.as_completed(running):
                    answers.append(await answered)
                    if "refused" in answers[-1]:
                        break  # the others wait for this one in vain
        except TimeoutError:
            answers.append({"refused": f"no answer within {_TASK_SECONDS:.0f} s"})
        if any(answer.keys() & {"refused", "lost"} for answer in answers):
            await self.stop()
            await asyncio.wait(running)
        return answers

    async def stop(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            await rank.stop()
        self.ranks = []


class Comparison:
    """Compares one architecture after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: Rank | None = None
        self._apart = False
        self._rings = {size: RingOf(size) for size in {*RING_SIZES, *TENSOR_SIZES}}

    async def stop(self) -> None:
        """End all processes."""
        if self._whole is not None:
            await self._whole.stop()
        for ring in self._rings.values():
            await ring.stop()

    async def verdict(self, name: str, config: dict[str, Any]) -> tuple[str, bool]:
        """Return what came of an architecture, and whether that is as it should be."""
        folder = self._folder / name
        self._apart = False
        try:
            made = make_model(config, folder)
            expected = await self._expected(folder, made.layer_count)
            if isinstance(expected, str):
                return f"mlx-lm itself fails: {expected}", False
            found = []
            for size in RING_SIZES:
                if made.layer_count >= size:
                    ring = self._rings[size]
                    found.append((size, await self._on(ring, folder, made, expected)))
            split = []
            for size in TENSOR_SIZES if made.can_split else ():
                tokens = mx.argmax(expected, axis=-1)
                split.append((size, await self._split_on(size, folder, made.layer_count, tokens)))
            said, right = _summary(found, split, len(made.cuts) + 1)
            if self._apart:
                said += "; one sequence a lane"
            if made.cuts and (wrong := await self._cut_elsewhere(folder, made)) is not None:
                said += f"; other cuts {'computed' if wrong else 'refused'}"
                right = right and not wrong
            return said, right
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _expected(self, folder: Path, layer_count: int) -> mx.array | str:
        if self._whole is None:
            self._whole = await Rank.start()
        answer = await self._whole.run(
            Task(str(folder), 0, layer_count, str(folder / "whole.safetensors"))
        )
        if "logits" in answer:
            return _loaded(answer["logits"], "logits")
        await self._whole.stop()
        self._whole = None
        return str(answer.get("refused", "its process died"))

    async def _split_on(self, size: int, folder: Path, layer_count: int, expected: mx.array) -> str:
        """Return "" when tensor ranks choose the expected tokens, else what they do."""
        path = str(folder / f"tensor-{size}.safetensors")
        task = Task(str(folder), 0, layer_count, path, tensor=True)
        answers = await self._rings[size].run([task] * size)
        for answer in answers:
            if "refused" in answer:
                return f"refused ({answer['refused']})"
        if not any("logits" in answer for answer in answers):
            return "a rank died"
        tokens = _loaded(path, "tokens")
        return "" if mx.array_equal(tokens, expected) else "other tokens"

    async def _cut_elsewhere(self, folder: Path, made: Made) -> bool | None:
        """Say whether a cut where none is allowed is not refused; None: there is no such."""
        elsewhere = sorted(set(range(1, made.layer_count)) - set(made.cuts))
        if not elsewhere:
            return None
        bounds = [0, elsewhere[0], made.layer_count]
        logits = str(folder / "elsewhere.safetensors")
        answers = await self._rings[2].run(
            [Task(str(folder), bounds[i], bounds[i + 1], logits) for i in range(2)]
        )
        return not any("refused" in answer for answer in answers)

    async def _on(self, ring: RingOf, folder: Path, made: Made, expected: mx.array) -> float | str:
        """Return the largest difference of any logit, or why there are none."""
        cuts = _bounds(made, ring.size)
        logits = str(folder / f"{ring.size}.safetensors")
        answers = await ring.run(
            [Task(str(folder), cuts[i], cuts[i + 1], logits) for i in range(ring.size)]
        )
        for answer in answers:
            if "refused" in answer:
                return str(answer["refused"])
        if not any("logits" in answer for answer in answers):
            return "a rank died"
        lanes = [answer["lanes"] for answer in answers if "lanes" in answer]
        if OTHER in lanes:
            return "lanes: two sequences in one lane get other tokens"
        self._apart |= APART in lanes
        got = _loaded(logits, "logits")
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"logits {got.shape} {got.dtype} instead of {expected.shape} {expected.dtype}"
        if mx.array_equal(got, expected):
            return 0.0
        difference: Any = mx.abs(got - expected).max().item()
        return float(difference)


def _loaded(path: str, name: str) -> mx.array:
    loaded = mx.load(path)
    assert isinstance(loaded, dict)
    array = loaded[name]
    assert isinstance(array, mx.array)
    return array


def _summary(
    found: list[tuple[int, float | str]], split: list[tuple[int, str]], most_stages: int
) -> tuple[str, bool]:
    said, right = _staged(found, most_stages)
    same = [str(size) for size, what in split if not what]
    if same:
        said += f"; same tokens on {' and '.join(same)} tensor ranks"
    other = [(size, what) for size, what in split if what]
    said += "".join(f"; on {size} tensor ranks {what}" for size, what in other)
    return said, right and all(what.startswith("refused") for _, what in other)


def _bounds(made: Made, size: int) -> list[int]:
    """Return where so many stages begin and end: as even as may be, or even where none may be."""
    even = [round(i * made.layer_count / size) for i in range(size + 1)]
    if len(made.cuts) < size - 1:
        return even
    ends: list[int] = []
    for i in range(1, size):
        left = made.cuts[made.cuts.index(ends[-1]) + 1 if ends else 0 :]
        # As many are left over as further stages need.
        ends.append(min(left[: len(left) - (size - 1 - i)], key=lambda cut: abs(cut - even[i])))
    return [0, *ends, made.layer_count]


def _staged(found: list[tuple[int, float | str]], most_stages: int) -> tuple[str, bool]:
    refused = [f"on {size}: {what}" for size, what in found if isinstance(what, str)]
    wrong = [f"{what:.3g} on {size}" for size, what in found if isinstance(what, float) and what]
    if wrong:
        return f"differs by {', '.join(wrong)}", False
    if any(isinstance(what, str) and what.startswith(_FAULTS) for _, what in found):
        return "; ".join(refused), False
    if refused:
        return f"refused ({refused[0]})", all(size > most_stages for size, _ in found)
    return f"exact on {' and '.join(str(size) for size, _ in found)}", True


async def run(configs: list[dict[str, Any]]) -> int:
    """Compare, print, and return how many are not as they should be."""
    folder = Path(tempfile.mkdtemp(prefix="exact-"))
    comparison = Comparison(folder)
    counts = {"exact": 0, "refused": 0, "wrong": 0}
    try:
        for config in configs:
            name = str(config["model_type"])
            said, right = await comparison.verdict(name, config)
            counts[said.split()[0] if right else "wrong"] += 1
            print(f"{name}: {said}", flush=True)
    finally:
        await comparison.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return counts["wrong"]


def main() -> None:
    """Compare the architectures of the file named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("Usage: python -m tests.conformance.exact CONFIGS [NAME ...]")
    configs = json.loads(Path(sys.argv[1]).read_text())
    names = set(sys.argv[2:])
    chosen = [c for c in configs if not names or c["model_type"] in names]
    sys.exit(1 if asyncio.run(run(chosen)) else 0)


if __name__ == "__main__":
    main()
