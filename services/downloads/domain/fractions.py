"""How much of a model a node has, from what its worker reports."""

from collections.abc import Iterable

from services.downloads.domain.records import (
    CachedModel,
    Download,
    DownloadState,
    ModelFacts,
    NodeFraction,
)


def node_fraction(
    node_id: str, cached: CachedModel | None, downloads: Iterable[Download]
) -> NodeFraction:
    """Return a node's fraction of a model at one revision.

    `cached` is what lies on its disk, `downloads` all of that model to that node. A download of
    some layers that completed leaves the whole model PENDING.
    """
    newest = max(downloads, key=lambda download: download.create_time, default=None)
    state = None if newest is None else newest.state
    if state is DownloadState.COMPLETED:
        state = DownloadState.PENDING
    if cached is None or cached.downloaded_bytes == 0:
        if state is DownloadState.PENDING and newest is not None and not newest.live:
            state = None  # Was completed once; its files are gone.
        return NodeFraction(node_id, 0.0, state, 0, cached.total_bytes if cached else 0)
    if cached.whole:
        total = cached.total_bytes
        return NodeFraction(node_id, 1.0, DownloadState.COMPLETED, total, total)
    fraction = cached.downloaded_bytes / cached.total_bytes if cached.total_bytes else 0.0
    return NodeFraction(
        node_id,
        fraction,
        state or DownloadState.PENDING,
        cached.downloaded_bytes,
        cached.total_bytes,
    )


def pick_cached(models: Iterable[CachedModel], revision: str | None) -> CachedModel | None:
    """Return the commit that `revision` means on a node; for None its fullest commit."""
    fitting = [model for model in models if revision is None or model.resolves(revision)]
    return max(fitting, key=lambda model: (model.downloaded_bytes, model.commit), default=None)


def pick_facts(models: Iterable[CachedModel]) -> ModelFacts | None:
    """Return the facts to trust: of a node whose engine runs the model and knows where it may be
    cut, with most of it on disk."""
    known = [model for model in models if model.facts is not None]
    best = max(
        known,
        key=lambda model: (
            model.facts is not None and model.facts.engine_supported,
            model.facts is not None and model.facts.cuts is not None,
            model.downloaded_bytes,
            model.commit,
        ),
        default=None,
    )
    return None if best is None else best.facts
