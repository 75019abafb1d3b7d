"""Node ids that two machines claim, listed for as long as both go on."""

from dataclasses import dataclass

from services.topology.domain.model import IdentityConflict

# Claimants listed of one node id; whoever reports further ones is refused all the same.
MAX_CLAIMANTS = 16
MIN_KEPT_SECONDS = 12.0


@dataclass
class _Claim:
    held_by: str
    end: float


class Conflicts:
    """Refused claims by node id and claimant; each ends one lease after its last report, but not
    before `MIN_KEPT_SECONDS`: who is refused does not know how often to report."""

    def __init__(self, lease_seconds: float) -> None:
        self._kept_seconds = max(lease_seconds, MIN_KEPT_SECONDS)
        self._claims: dict[str, dict[str, _Claim]] = {}

    def note(self, node_id: str, held_by: str, claimed_by: str, now: float) -> bool:
        """Take a claim; return whether the list differs now."""
        claims = self._claims.setdefault(node_id, {})
        known = claims.get(claimed_by)
        if known is None and len(claims) >= MAX_CLAIMANTS:
            return False
        claims[claimed_by] = _Claim(held_by, now + self._kept_seconds)
        return known is None or known.held_by != held_by

    def expire(self, now: float) -> bool:
        """Drop claims that have ended; return whether there were any."""
        ended = [
            (node_id, claimant)
            for node_id, claims in self._claims.items()
            for claimant, claim in claims.items()
            if claim.end <= now
        ]
        for node_id, claimant in ended:
            del self._claims[node_id][claimant]
            if not self._claims[node_id]:
                del self._claims[node_id]
        return bool(ended)

    def drop(self, node_id: str) -> None:
        """Drop the claims of one id: its place is free."""
        self._claims.pop(node_id, None)

    def ends(self) -> list[float]:
        """Return when claims end."""
        return [claim.end for claims in self._claims.values() for claim in claims.values()]

    def listed(self) -> tuple[IdentityConflict, ...]:
        """Return the conflicts by node id and claimant."""
        return tuple(
            IdentityConflict(node_id, claim.held_by, claimant)
            for node_id, claims in sorted(self._claims.items())
            for claimant, claim in sorted(claims.items())
        )
