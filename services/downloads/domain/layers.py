"""Which part of a model a tensor belongs to, judged by its name."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from services.downloads.domain.header import Malformed

_NUMBERED = re.compile(r"(?:^|(.*?)\.)(\d{1,5})(?:\.|$)")
_EMBEDDING = re.compile(r"(?:^|\.)(?:wte|wpe|[a-z_]*embed[a-z_]*)(?:\.|$)")
_LAST = re.compile(r"(?:^|\.)(?:[a-z_]*norm[a-z_0-9]*|ln_f|lm_head|embed_out|output|head)(?:\.|$)")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output|head)(?:\.|$)")
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Part:
    """Where a tensor is needed: in a layer, or by the first or the last stage, or by both."""

    layer: int | None = None
    first: bool = False
    last: bool = False


def layer_prefix(tensor_bytes: Mapping[str, int], layer_count: int | None) -> tuple[str, int]:
    """Return what stands before the layer number in tensor names, and how many layers there are.

    `layer_count` is what config.json says. The prefix is the one whose numbers are exactly
    0 to layer_count-1; else one that has all of these and more (extra layers that predict
    further tokens); else the heaviest whose numbers all lie below (some layers own no weights).
    Raises Malformed when there is none.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    weight: dict[str, int] = defaultdict(int)
    for name, size in tensor_bytes.items():
        if match := _NUMBERED.match(name):
            prefix = match[1] or ""
            numbers[prefix].add(int(match[2]))
            weight[prefix] += size

    def rank(prefix: str) -> tuple[int, int]:
        found = numbers[prefix]
        if layer_count is None:
            fit = 3 if found == set(range(len(found))) else 0
        else:
            wanted = set(range(layer_count))
            fit = 3 if found == wanted else 2 if found > wanted else 1 if found < wanted else 0
        return fit, weight[prefix]

    best = max(sorted(numbers), key=rank, default=None)
    if best is None or rank(best)[0] == 0:
        raise Malformed(f"no tensors are numbered like its {layer_count or 'own'} layers")
    count = layer_count or len(numbers[best])
    if count > MAX_LAYERS:
        raise Malformed(f"it claims {count} layers")
    return best, count


def further_layers(
    tensor_bytes: Mapping[str, int], prefix: str, layer_count: int
) -> tuple[str, int] | None:
    """Return under which other prefix the layers are numbered anew, and from which layer on.

    Such as "model.kv_reuse_layers" after "model.layers": one of the same place and a longer name,
    whose numbers are as many as the first one lacks. None: there is no other.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in tensor_bytes:
        if match := _NUMBERED.match(name):
            numbers[match[1] or ""].add(int(match[2]))
    first, (place, _, own) = numbers[prefix], prefix.rpartition(".")
    if first != set(range(len(first))) or len(first) >= layer_count:
        return None
    for other, found in sorted(numbers.items()):
        where, _, name = other.rpartition(".")
        if (
            where == place
            and name.endswith(f"_{own}")
            and found == set(range(layer_count - len(first)))
        ):
            return other, len(first)
    return None


def head_is_tied(names: Mapping[str, int], prefix: str, config_says: bool) -> bool:
    """True when the last stage needs the embedding as its head."""
    return config_says or not any(_HEAD.search(name) for name in names if not _in(name, prefix))


def part_of(
    name: str,
    prefix: str,
    layer_count: int,
    tied: bool,
    further: tuple[str, int] | None = None,
) -> Part:
    """Return where a tensor is needed. What cannot be told is needed by both end stages."""
    if further is not None and _in(name, further[0]):
        match = _NUMBERED.match(name)
        return Part(layer=further[1] + int(match[2])) if match else Part(last=True)
    if _in(name, prefix):
        match = _NUMBERED.match(name)
        layer = int(match[2]) if match else layer_count
        return Part(layer=layer) if layer < layer_count else Part(last=True)
    if _EMBEDDING.search(name) and not _HEAD.search(name):
        return Part(first=True, last=tied)
    if _LAST.search(name):
        return Part(last=True)
    return Part(first=True, last=True)


def _in(name: str, prefix: str) -> bool:
    match = _NUMBERED.match(name)
    return match is not None and (match[1] or "") == prefix
