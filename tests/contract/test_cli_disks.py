"""`shardring`: verifying what is on nodes' disks, removing it, and downloads as they are shown."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Reason, ShardringError
from shardring.downloads.v1 import downloads_pb2
from shardring.downloads.v1 import downloads_service_pb2 as pb
from tests.contract.cli_lab import MODEL, FakeCluster, ended, fake_cluster

OTHER = "org/other"
COMPLETED = downloads_pb2.DOWNLOAD_STATE_COMPLETED
IN_USE = ShardringError(
    Reason.MODEL_IN_USE, "org/model is run by instance chat. Stop that first.", metadata={"x": "y"}
)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """ada has both models and bob one."""
    async with fake_cluster("ada", "bob") as cluster:
        whole = [
            downloads_pb2.NodeFraction(
                node_id=node_id(cluster, name),
                fraction=1,
                state=COMPLETED,
                downloaded_bytes=3000,
                total_bytes=3000,
            )
            for name in ("ada", "bob")
        ]
        cluster.downloads.models = [
            pb.ModelOnNodes(model_id=MODEL, fractions=whole),
            pb.ModelOnNodes(model_id=OTHER, fractions=whole[:1]),
        ]
        yield cluster


def node_id(cluster: FakeCluster, name: str) -> str:
    return cluster.nodes[name].node.node_id


def found(*corrupt: str, unknown: tuple[str, ...] = ()) -> list[pb.Verification]:
    end = pb.Verification(
        verified_bytes=3000,
        total_bytes=3000,
        corrupt_files=corrupt,
        unverifiable_files=unknown,
        done=True,
    )
    return [pb.Verification(verified_bytes=1000, total_bytes=3000), end]


async def test_verify_reads_everything_and_says_so(cluster: FakeCluster) -> None:
    cluster.downloads.verifications = {node_id(cluster, name): found() for name in ("ada", "bob")}
    run = await cluster.run("models", "--verify")
    assert (run.code, run.out.splitlines()) == (
        0,
        [
            "ada: org/model: all 3.0 kB are as they should be",
            "ada: org/other: all 3.0 kB are as they should be",
            "bob: org/model: all 3.0 kB are as they should be",
        ],
    )
    assert "ada: reading org/model, 33 % of 3.0 kB" in run.err


async def test_verify_names_what_was_corrupt_and_what_to_do(cluster: FakeCluster) -> None:
    cluster.downloads.verifications = {
        node_id(cluster, "ada"): found("b.safetensors", unknown=("x.json",)),
        node_id(cluster, "bob"): found(unknown=("x.json",)),
    }
    run = await cluster.run("models", MODEL, "--verify")
    assert run.code == 1
    assert run.out.splitlines() == [
        "ada: org/model: 1 corrupt file in 3.0 kB",
        "ada: org/model: corrupt and removed: b.safetensors",
        "ada: fetch what was removed: shardring download org/model --node ada",
        "ada: org/model: no hash is known of x.json; to fetch anew what cannot be told, remove "
        "the model and download it",
        "bob: org/model: nothing wrong found in 3.0 kB",
        "bob: org/model: no hash is known of x.json; to fetch anew what cannot be told, remove "
        "the model and download it",
    ]
    run = await cluster.run("models", MODEL, "--verify", "--nodes", "ada,bob", "--json")
    assert run.code == 1
    ada, bob = run.document["verifications"]
    assert (ada["node_id"], ada["model_id"]) == (node_id(cluster, "ada"), MODEL)
    assert ada["verification"]["corrupt_files"] == ["b.safetensors"]
    assert bob["verification"]["corrupt_files"] == []


async def test_a_node_that_cannot_verify_says_why(cluster: FakeCluster) -> None:
    cluster.downloads.verifications = {node_id(cluster, "bob"): found()}
    run = await cluster.run("models", MODEL, "--verify")
    assert (run.code, run.out) == (1, "bob: org/model: all 3.0 kB are as they should be\n")
    assert run.err.splitlines()[-2:] == [
        "ada: org/model: It is being downloaded.",
        "MODEL_IN_USE",
    ]
    run = await cluster.run("models", "org/none", "--verify", "--json")
    assert (run.code, run.error["reason"]) == (1, "MODEL_NOT_FOUND")


async def test_an_interrupted_verification_is_stopped(cluster: FakeCluster) -> None:
    cluster.downloads.verifications = {node_id(cluster, "ada"): found()[:1]}
    async with cluster.running("models", MODEL, "--verify", "--node", "ada") as process:
        async with asyncio.timeout(30):
            await cluster.downloads.verifying.wait()
        process.send_signal(signal.SIGINT)
        run = await ended(process)
        async with asyncio.timeout(10):
            await cluster.downloads.verify_cancelled.wait()
    assert run.code == 130
    assert "Traceback" not in run.err


async def test_rm_frees_every_node_that_has_any(cluster: FakeCluster) -> None:
    cluster.downloads.freed = {node_id(cluster, "ada"): 3000, node_id(cluster, "bob"): 2_000_000}
    run = await cluster.run("rm", MODEL, "--yes")
    assert (run.code, run.out) == (0, "ada: freed 3.0 kB\nbob: freed 2.0 MB\n")
    run = await cluster.run("rm", OTHER, "--yes", "--json")
    assert run.document == {"nodes": [{"node_id": node_id(cluster, "ada"), "freed_bytes": "3000"}]}


async def test_rm_tells_each_node_s_refusal(cluster: FakeCluster) -> None:
    cluster.downloads.freed = {node_id(cluster, "ada"): 3000, node_id(cluster, "bob"): IN_USE}
    run = await cluster.run("rm", MODEL, "-y")
    assert (run.code, run.out) == (1, "ada: freed 3.0 kB\n")
    assert run.err.splitlines()[-2:] == [
        "bob: org/model is run by instance chat. Stop that first.",
        "MODEL_IN_USE · x: y",
    ]
    run = await cluster.run("rm", "org/none", "-y")
    assert (run.code, run.err.splitlines()[-1]) == (1, "MODEL_NOT_FOUND")


async def test_rm_asks_nobody_who_cannot_answer(cluster: FakeCluster) -> None:
    run = await cluster.run("rm", MODEL)
    assert run.code == 2
    assert "say --yes" in run.err


@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        (b"y\n", 0, "ada: freed 3.0 kB"),
        (b"\n", 1, "Nothing was removed."),
        (b"\x04", 1, "Nothing was removed."),
        (b"\x03", 130, "[y/N]"),
    ],
)
async def test_rm_asks_on_a_terminal(
    cluster: FakeCluster, typed: bytes, code: int, told: str
) -> None:
    cluster.downloads.freed = {node_id(cluster, name): 3000 for name in ("ada", "bob")}
    async with terminal(cluster, "rm", MODEL) as shown:
        await shown.until("Remove org/model from ada (3.0 kB) and bob (3.0 kB)? [y/N]")
        shown.type(typed)
        assert await shown.ended() == code
    assert told in shown.text
    assert ("freed" in shown.text) == (code == 0)


async def test_a_download_on_a_terminal_shows_bars_and_what_ctrl_c_does(
    cluster: FakeCluster,
) -> None:
    ada, bob = (node_id(cluster, name) for name in ("ada", "bob"))
    going = downloads_pb2.Download(
        download_id="d-ada",
        node_id=ada,
        model_id=MODEL,
        state=downloads_pb2.DOWNLOAD_STATE_ONGOING,
        downloaded_bytes=500,
        total_bytes=1000,
        bytes_per_second=100,
        files=[downloads_pb2.FileProgress(name="f", source_node_id=bob, bytes_per_second=100)],
    )
    done = downloads_pb2.Download(
        download_id="d-ada",
        node_id=ada,
        model_id=MODEL,
        state=COMPLETED,
        downloaded_bytes=1000,
        total_bytes=1000,
        received_from_nodes_bytes=500,
    )
    cluster.downloads.steps = {ada: [going]}
    async with terminal(cluster, "download", MODEL, "--node", "ada") as shown:
        await shown.until("Ctrl-C cancels what this command started")
        assert "100 B/s" in shown.text
        assert "bob" in shown.text
        shown.type(b"\x03")
        assert await shown.ended() == 130
    assert cluster.downloads.cancelled == ["d-ada"]
    cluster.downloads.steps = {ada: [done]}
    run = await cluster.run("download", MODEL, "--node", "ada")
    assert (run.out, run.err) == ("ada: COMPLETED 100 % of 1.0 kB, from nodes\n", "")


# Takes standard input for the terminal whose keys send signals, then becomes the command.
_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class terminal:
    """Runs the command on a terminal of its own, of 80 columns; keeps what it shows."""

    def __init__(self, cluster: FakeCluster, *arguments: str) -> None:
        self._cluster = cluster
        self._arguments = arguments
        self.text = ""

    async def __aenter__(self) -> "terminal":
        self._ours, theirs = pty.openpty()
        environment = {**self._cluster.environment, "TERM": "xterm", "COLUMNS": "80"}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _ON_TERMINAL, "-m", "services.cli", *self._arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = asyncio.Event()
        self._over = False
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    async def until(self, text: str) -> None:
        """Wait until it has shown a text; line ends count as any white space."""
        async with asyncio.timeout(30):
            while text not in " ".join(self.text.split()):
                self._seen.clear()
                await self._seen.wait()

    async def ended(self) -> int:
        """Return the exit code, with everything shown until then."""
        async with asyncio.timeout(30):
            code = await self._process.wait()
            while not self._over:
                self._seen.clear()
                await self._seen.wait()
        return code

    def _read(self) -> None:
        try:
            piece = os.read(self._ours, 65536)
        except OSError:
            piece = b""  # So Linux says that the other side is closed.
        if not piece:
            self._over = True
            asyncio.get_running_loop().remove_reader(self._ours)
        self.text += piece.decode(errors="replace")
        self._seen.set()
