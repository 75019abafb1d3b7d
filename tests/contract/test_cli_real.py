"""`shardring` against the real services and a real node, each a process of its own."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.cli.lab import Lab
from tests.contract.cli_lab import Ended, command, ended

MODELS = Path(__file__).parents[2] / "models"
MODEL = "shardring/tiny-facts"

Run = Callable[..., Awaitable[Ended]]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """Runs the command against a cluster of one node."""
    lab = Lab(tmp_path)

    async def run(*arguments: str) -> Ended:
        async with command(arguments, {**os.environ, **lab.client_environment}) as process:
            return await ended(process)

    try:
        await lab.start_control(MODELS)
        await lab.start_node("ada")
        yield run
    finally:
        await lab.stop()


def spoil_one(folder: Path) -> str:
    """Change a byte of one weight file of a cache below; return the file's name."""
    weights = min(folder.rglob("snapshots/*/*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return weights.name


async def test_from_nothing_to_an_answer_and_back(run: Run) -> None:
    assert (await run("download", MODEL, "--node", "ada")).code == 0
    (model,) = (await run("models", "--json")).document["models"]
    assert model["fractions"][0]["fraction"] == 1.0
    assert "(taken by up and run)" in (await run("preview", MODEL)).out

    up = await run("up", MODEL, "--name", "facts")
    assert (up.code, up.out) == (0, "facts is READY on ada [0,8)\n"), up.err
    answer = await run("generate", "facts", "What is the capital of France?")
    assert answer.out == "The capital of France is Paris.\n"
    refused = await run("generate", "facts", "x", "--temperature", "-1", "--json")
    assert refused.error["metadata"]["field"] == "sampling.temperature"

    # It is there already, so nothing is started or stopped for this.
    again = await run("run", MODEL, "What is the capital of Italy?")
    assert (again.code, again.out) == (0, "The capital of Italy is Rome.\n")
    (instance,) = (await run("ps", "--json")).document["instances"]
    assert instance["state"] == "INSTANCE_STATE_READY"

    assert (await run("down", "facts")).out == "facts is STOPPED\n"
    assert (await run("down", "facts")).code == 0
    gone = await run("generate", "facts", "x", "--json")
    assert gone.error["reason"] == "INSTANCE_NOT_READY"

    fresh = await run("run", MODEL, "What is the capital of Italy?")
    assert (fresh.code, fresh.out) == (0, "The capital of Italy is Rome.\n")
    states = [i["state"] for i in (await run("ps", "--json")).document["instances"]]
    assert states == ["INSTANCE_STATE_STOPPED"] * 2


async def test_what_is_on_a_disk_is_told_verified_and_removed(run: Run, tmp_path: Path) -> None:
    assert (await run("download", MODEL)).out.startswith("ada: COMPLETED 100 % of ")
    facts = await run("models", MODEL)
    assert "mlx-lm runs it" in facts.out
    (disk,) = (await run("models", "--json")).document["disks"]
    assert int(disk["available_bytes"]) > 0

    assert "are as they should be" in (await run("models", "--verify")).out
    spoiled = spoil_one(tmp_path)
    corrupt = await run("models", "--verify", MODEL)
    assert (corrupt.code, corrupt.err) == (1, "")
    assert f"corrupt and removed: {spoiled}" in corrupt.out
    assert (await run("download", MODEL)).code == 0
    assert (await run("models", "--verify", MODEL)).code == 0

    assert (await run("up", MODEL, "--name", "facts")).code == 0
    refused = await run("rm", MODEL, "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert "facts" in refused.err
    assert "MODEL_IN_USE" in refused.err
    assert (await run("down", "facts")).code == 0
    freed = await run("rm", MODEL, "--yes")
    assert (freed.code, freed.out.split()[:2]) == (0, ["ada:", "freed"])
    assert (await run("models", "--json")).document["models"] == []
