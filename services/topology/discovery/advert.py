"""What a topology service says of its cluster on the LAN, and which of several is meant.

Plain data and decisions, no I/O.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.addresses import HostPort
from services.common.errors import Reason, ShardringError, invalid_field

SERVICE_TYPE = "_shardring._tcp.local."
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")


@dataclass(frozen=True)
class Advert:
    """One topology service. `instance` is its name on the LAN; `hosts` are its addresses, best
    guess first. Placement and downloads are on the same machine, at these ports."""

    instance: str
    cluster_name: str
    hosts: tuple[str, ...]
    topology_port: int
    placement_port: int
    downloads_port: int

    def described(self) -> str:
        """Return cluster and address, for messages to people."""
        where = str(HostPort(self.hosts[0], self.topology_port)) if self.hosts else "no address"
        return f"{self.cluster_name} at {where}"


def check_cluster_name(name: str) -> None:
    """Refuse what cannot be a cluster's name. Raises INVALID_FIELD."""
    if not _CLUSTER_NAME.fullmatch(name):
        raise invalid_field(
            "cluster_name", name, "1 to 63 letters, digits, dots, hyphens or underscores"
        )


def advert_to_txt(advert: Advert) -> dict[str, str]:
    """Return the TXT record's entries. Addresses and topology port stand in other records, where
    addresses have no order: the best one is named here."""
    return {
        "address": advert.hosts[0],
        "cluster": advert.cluster_name,
        "placement": str(advert.placement_port),
        "downloads": str(advert.downloads_port),
    }


def advert_from_txt(
    instance: str, hosts: Sequence[str], port: int, txt: Mapping[str, str]
) -> Advert | None:
    """Return what was found on the LAN; None where it is not, or not rightly, ours."""
    name, placement, downloads = (txt.get(key, "") for key in ("cluster", "placement", "downloads"))
    ports = [
        int(text) if text.isascii() and text.isdigit() else 0 for text in (placement, downloads)
    ]
    if not _CLUSTER_NAME.fullmatch(name) or not hosts:
        return None
    if not all(1 <= number <= 65535 for number in (port, *ports)):
        return None
    best_first = sorted(hosts, key=lambda host: host != txt.get("address"))
    return Advert(instance, name, tuple(best_first), port, *ports)


def chosen(found: Sequence[Advert], cluster_name: str) -> Advert:
    """Return the one cluster that is meant: that of the name, or the only one there is.

    Raises CLUSTER_NOT_FOUND and CLUSTER_AMBIGUOUS, which list what was found.
    """
    meant = [advert for advert in found if cluster_name in ("", advert.cluster_name)]
    if len(meant) == 1:
        return meant[0]
    listed = ", ".join(sorted(advert.described() for advert in meant or found))
    if meant:
        raise ShardringError(
            Reason.CLUSTER_AMBIGUOUS,
            f"Several topology services are on this LAN: {listed}. Say which one is meant: with "
            "--cluster-name where the names differ, else with its address.",
            metadata={"cluster_name": cluster_name, "found": listed},
        )
    wanted = f"No cluster named {cluster_name}" if cluster_name else "No cluster"
    others = f" There are others: {listed}." if listed else ""
    raise ShardringError(
        Reason.CLUSTER_NOT_FOUND,
        f"{wanted} was found on this LAN.{others} Start one with: shardring serve topology "
        "--listen 0.0.0.0:52410, or give the address of one that multicast does not reach.",
        metadata={"cluster_name": cluster_name, "found": listed},
    )
