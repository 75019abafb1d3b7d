"""Which machine this is: facts that stay when its addresses, its system or its name change.

A copy of its disk on another machine has other facts; the disk's own are the weakest of all.
"""

import hashlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

# Kinds of facts, the strongest first. What a machine does not have, or does not show to this
# user, is left out.
KINDS = ("ioreg", "dmi", "device-tree", "mac", "machine-id")

MachineFacts = Mapping[str, frozenset[str]]  # digests by kind

_PLATFORM_UUID = re.compile(r'"IOPlatformUUID"\s*=\s*"([0-9A-Fa-f-]{36})"')
# What boards report whose maker never wrote a UUID of their own.
_PLACEHOLDER_UUIDS = frozenset({"03000200-0400-0500-0006-000700080009"})
_NET_ADDR_PERM = "0"  # addr_assign_type of include/uapi/linux/netdevice.h
_MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")
_ETHER = "1"


def same_machine(kept: MachineFacts, now: MachineFacts) -> bool:
    """Say whether two sets of facts are of one machine.

    The strongest kind that both have decides: a shared fact is enough, for a network card may
    come or go. Nothing to compare: nothing speaks against it.
    """
    for kind in KINDS:
        if kept.get(kind) and now.get(kind):
            return bool(kept[kind] & now[kind])
    return True


def fingerprint(node_id: str, facts: MachineFacts, folder: Path) -> str:
    """Return what tells a node's machine and data folder from any other: 32 hexadecimal digits.

    "" where the machine shows no facts. The folder's inode tells a copied folder from its
    original on one machine. It is of use between live runs only: it may differ after a system
    was set up anew, or between users that see different facts.
    """
    strongest = next((kind for kind in KINDS if facts.get(kind)), None)
    if strongest is None:
        return ""
    parts = [node_id, strongest, *sorted(facts[strongest]), str(folder.stat().st_ino)]
    return _digest("\n".join(parts))


def read_machine_facts() -> MachineFacts:
    """Ask the operating system; empty, with a word in the log, where it doesn't tell. Blocks."""
    facts = _read_macos() if sys.platform == "darwin" else read_linux_machine()
    if not facts:
        logger.warning("This machine shows nothing to recognise it by; a cloned disk goes unseen")
    return facts


def parse_platform_uuid(text: str) -> str:
    """Return the hardware UUID from `ioreg -rd1 -c IOPlatformExpertDevice`, "" if it has none."""
    found = _PLATFORM_UUID.search(text)
    return found[1].upper() if found else ""


def read_linux_machine(root: Path = Path("/")) -> MachineFacts:
    """Return the facts that /sys and /etc show. `root`: where these are."""
    uuid = _read(root / "sys/class/dmi/id/product_uuid").lower()  # root may read it, others not
    serial = _read(root / "sys/firmware/devicetree/base/serial-number").strip("\0")
    return _facts(
        {
            "dmi": [uuid] if _is_real_uuid(uuid) else [],
            "device-tree": [serial] if serial.strip("0") else [],
            "mac": _permanent_macs(root / "sys/class/net"),
            "machine-id": [_read(root / "etc/machine-id")],
        }
    )


def facts_to_text(facts: MachineFacts) -> str:
    """Return facts as lines of "KIND DIGEST"."""
    return "\n".join(f"{kind} {digest}" for kind in KINDS for digest in sorted(facts.get(kind, ())))


def facts_from_text(text: str) -> MachineFacts:
    """Return the facts in such lines; others are passed over."""
    facts: dict[str, set[str]] = {}
    for line in text.splitlines():
        kind, _, digest = line.partition(" ")
        if kind in KINDS and digest:
            facts.setdefault(kind, set()).add(digest)
    return {kind: frozenset(digests) for kind, digests in facts.items()}


def _read_macos() -> MachineFacts:
    try:
        listed = subprocess.run(
            ["/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("Cannot read the hardware UUID: %s", error)
        return {}
    return _facts({"ioreg": [parse_platform_uuid(listed.stdout)]})


def _permanent_macs(net: Path) -> list[str]:
    """Return the burnt-in addresses of built-in cards.

    Not of what is on USB: an adapter goes from one machine to another. A card in a bond shows the
    bond's address, and its own beside it.
    """
    if not net.is_dir():
        return []
    macs = []
    for path in sorted(net.iterdir()):
        device = path / "device"
        if not device.exists() or "/usb" in str(device.resolve()) or _read(path / "type") != _ETHER:
            continue
        mac = _read(path / "bonding_slave" / "perm_hwaddr")
        if not mac and _read(path / "addr_assign_type") == _NET_ADDR_PERM:
            mac = _read(path / "address")
        if _MAC.fullmatch(mac) and mac.strip("0:"):
            macs.append(mac)
    return macs


def _is_real_uuid(uuid: str) -> bool:
    digits = uuid.replace("-", "")
    return len(digits) == 32 and len(set(digits)) > 1 and uuid not in _PLACEHOLDER_UUIDS


def _facts(found: Mapping[str, Iterable[str]]) -> MachineFacts:
    digests = {
        kind: frozenset(_digest(f"{kind}:{value}") for value in values if value)
        for kind, values in found.items()
    }
    return {kind: values for kind, values in digests.items() if values}


def _digest(text: str) -> str:
    # The facts are serial numbers: what is kept and sent tells none of them.
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
