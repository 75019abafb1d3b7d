"""A machine is recognised by its hardware, and a copy of its disk on another one is found out."""

from pathlib import Path

import pytest

from services.common.server import StartError
from services.topology.agent.identity import Identity, held_identity
from services.topology.agent.machine import (
    MachineFacts,
    facts_from_text,
    facts_to_text,
    fingerprint,
    parse_platform_uuid,
    read_linux_machine,
    read_machine_facts,
    same_machine,
)
from tests.unit.topology.recorded import linux_root, text


def facts(**kinds: str) -> MachineFacts:
    """Return facts: "mac" and the like, each with values between spaces."""
    return {kind.replace("_", "-"): frozenset(values.split()) for kind, values in kinds.items()}


def held(folder: Path, machine: MachineFacts) -> Identity:
    with held_identity(folder, lambda: machine) as identity:
        return identity


@pytest.mark.parametrize(
    ("kept", "now", "same"),
    [
        (facts(dmi="u1", mac="a b"), facts(dmi="u1", mac="a b"), True),
        # A clone: another board and cards, the disk's own id unchanged.
        (facts(dmi="u1", mac="a", machine_id="m"), facts(dmi="u2", mac="b", machine_id="m"), False),
        (facts(mac="a", machine_id="m"), facts(mac="b", machine_id="m"), False),
        # Another user, who may not read the board's.
        (facts(dmi="u1", mac="a", machine_id="m"), facts(mac="a", machine_id="m"), True),
        (facts(dmi="u1", machine_id="m"), facts(mac="a", machine_id="m"), True),
        # A card more, a card less, a card for another; the board decides.
        (facts(mac="a b"), facts(mac="b c"), True),
        (facts(dmi="u1", mac="a"), facts(dmi="u1", mac="z"), True),
        (facts(dmi="u1", mac="a"), facts(dmi="u2", mac="a"), False),
        # The system set up anew on the same machine.
        (facts(mac="a", machine_id="m"), facts(mac="a", machine_id="n"), True),
        # Containers: only the disk's own id, or nothing at all.
        (facts(machine_id="m"), facts(machine_id="n"), False),
        (facts(), facts(mac="a"), True),
        (facts(mac="a"), facts(), True),
    ],
)
def test_what_is_one_machine(kept: MachineFacts, now: MachineFacts, same: bool) -> None:
    assert same_machine(kept, now) is same


def test_a_copied_data_folder_is_refused_on_another_machine_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    one, other = facts(dmi="u1", machine_id="m"), facts(dmi="u2", machine_id="m")
    first = held(tmp_path, one)
    with pytest.raises(StartError, match="made on another machine") as caught:
        held(tmp_path, other)
    assert f"delete {tmp_path / 'node-id'}" in str(caught.value)
    # Nothing was changed: the machine it belongs to goes on.
    assert held(tmp_path, one).node_id == first.node_id
    (tmp_path / "node-id").unlink()
    fresh = held(tmp_path, other)
    assert fresh.node_id != first.node_id
    assert held(tmp_path, other).node_id == fresh.node_id


def test_a_machine_that_was_replaced_hands_on_its_id(tmp_path: Path) -> None:
    first = held(tmp_path, facts(dmi="u1"))
    (tmp_path / "machine").unlink()
    assert held(tmp_path, facts(dmi="u2")).node_id == first.node_id
    with pytest.raises(StartError):
        held(tmp_path, facts(dmi="u1"))


def test_facts_are_kept_up_as_cards_change_and_users_differ(tmp_path: Path) -> None:
    first = held(tmp_path, facts(mac="a b"))
    for now in (facts(mac="b c"), facts(dmi="u1", mac="c d"), facts(mac="x")):
        if now == facts(mac="x"):
            with pytest.raises(StartError):
                held(tmp_path, now)
        else:
            assert held(tmp_path, now).node_id == first.node_id
    # The board was seen once: with it, all cards may be new.
    assert held(tmp_path, facts(dmi="u1", mac="x y")).node_id == first.node_id


def test_fingerprints_differ_by_machine_node_and_folder_and_stay_over_restarts(
    tmp_path: Path,
) -> None:
    one = facts(dmi="u1", mac="a")
    (tmp_path / "copy").mkdir()
    made = fingerprint("id", one, tmp_path)
    assert len(made) == 32
    # Another card changes nothing while the board is the same.
    assert fingerprint("id", facts(dmi="u1", mac="b"), tmp_path) == made
    others = {
        fingerprint("id", facts(dmi="u2", mac="a"), tmp_path),
        fingerprint("id", one, tmp_path / "copy"),
        fingerprint("other", one, tmp_path),
        made,
    }
    assert len(others) == 4
    assert fingerprint("id", facts(), tmp_path) == ""
    assert held(tmp_path / "node", one).fingerprint == held(tmp_path / "node", one).fingerprint


def test_facts_survive_their_file() -> None:
    some = facts(dmi="u1", mac="a b", machine_id="m")
    assert facts_from_text(facts_to_text(some)) == some
    assert facts_from_text("nonsense\nnewer-kind x\n\nmac \nmac a\n") == facts(mac="a")


def test_the_hardware_uuid_of_a_mac() -> None:
    listed = text("mac-studio-m3-ultra.ioreg.txt")
    assert parse_platform_uuid(listed) == "12345678-90AB-5CDE-8F01-234567890ABC"
    assert parse_platform_uuid("") == ""


@pytest.mark.parametrize(
    ("machine", "kinds"),
    [
        # The card and the wireless one; not the USB adapter, nor what software made up.
        ("linux-desktop", {"dmi": 1, "mac": 2, "machine-id": 1}),
        # A placeholder is no board's UUID; cards in a bond have their own addresses.
        ("linux-server-bond", {"mac": 3, "machine-id": 1}),
        ("linux-docker-host", {"mac": 1, "machine-id": 1}),
        ("linux-container", {}),
        ("linux-raspberry-pi", {"device-tree": 1, "mac": 2, "machine-id": 1}),
    ],
)
def test_the_facts_of_linux_machines(machine: str, kinds: dict[str, int], tmp_path: Path) -> None:
    found = read_linux_machine(linux_root(machine, tmp_path))
    assert {kind: len(values) for kind, values in found.items()} == kinds


def test_a_bond_hides_no_card(tmp_path: Path) -> None:
    """With the bond and without it the machine is the same."""
    bonded = read_linux_machine(linux_root("linux-server-bond", tmp_path / "a"))
    apart = linux_root("linux-server-bond", tmp_path / "b")
    for card, address in (("eno1", "00:00:5e:00:53:61"), ("eno2", "00:00:5e:00:53:62")):
        (apart / "sys/class/net" / card / "bonding_slave/perm_hwaddr").unlink()
        (apart / "sys/class/net" / card / "addr_assign_type").write_text("0\n")
        (apart / "sys/class/net" / card / "address").write_text(f"{address}\n")
    assert read_linux_machine(apart) == bonded


def test_this_machine_is_itself() -> None:
    assert same_machine(read_machine_facts(), read_machine_facts())
