"""A node's identity survives restarts, races and clocks; one process holds a data folder."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.server import StartError
from services.topology.agent.identity import Identity, held_identity


def test_the_id_is_kept_and_each_run_is_later(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "node"
    with held_identity(folder) as first:
        pass
    # The clock is set back by a century.
    (folder / "last-start").write_text(f"{first.start_ns + 10**20}\n")
    with held_identity(folder) as second:
        pass
    assert second.node_id == first.node_id
    assert second.start_ns == first.start_ns + 10**20 + 1
    assert sorted(path.name for path in folder.iterdir()) == [
        "last-start",
        "machine",
        "node-id",
        "node.lock",
    ]


def test_those_that_start_at_once_get_the_same_id(tmp_path: Path) -> None:
    def started(_: int) -> Identity | None:
        try:
            with held_identity(tmp_path) as identity:
                return identity
        except StartError:
            return None  # another one holds the folder

    with ThreadPoolExecutor(8) as pool:
        identities = [identity for identity in pool.map(started, range(64)) if identity]
    assert identities
    assert len({identity.node_id for identity in identities}) == 1
    assert len({identity.start_ns for identity in identities}) == len(identities)


def test_a_folder_is_held_by_one_process_until_that_ends(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from services.topology.agent.identity import held_identity\n"
        "with held_identity(pathlib.Path(sys.argv[1])) as identity:\n"
        "    print(identity.node_id, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        node_id = holder.stdout.readline().strip()
        with pytest.raises(StartError, match="Another node runs"), held_identity(tmp_path):
            pass
        holder.kill()
    with held_identity(tmp_path) as identity:
        assert identity.node_id == node_id


def test_a_spoilt_id_is_refused_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "node-id").write_text("")
    with pytest.raises(StartError, match="Delete it"), held_identity(tmp_path):
        pass
    assert (tmp_path / "node-id").read_text() == ""


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="Cannot use"), held_identity(tmp_path / "file" / "node"):
        pass
