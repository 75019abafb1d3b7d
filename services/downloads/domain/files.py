"""Which files of a repository a node needs."""

import re
from collections.abc import Collection, Iterable

from services.downloads.domain.header import Malformed, parse_object
from services.downloads.domain.names import is_safe_file
from services.downloads.domain.records import Layers, ModelFacts, ModelFile

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MAX_FILES = 4096

# mlx-lm loads exactly these from a model's folder.
_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
# Configuration, tokenizers and chat templates. Code (*.py) is never fetched.
_EVERY_STAGE = re.compile(r"[^/]+\.(json|txt|model|jinja|tiktoken)")


class NoWeights(Exception):
    """The repository holds no weights in safetensors files."""


def every_stage_files(names: Iterable[str]) -> list[str]:
    """Return the files every stage needs: configuration, tokenizer, templates, index."""
    return sorted(
        name
        for name in names
        if is_safe_file(name)
        and _EVERY_STAGE.fullmatch(name)
        and (not name.endswith(".index.json") or name == INDEX)
    )


def weight_files(names: Collection[str], index: bytes | None) -> list[str]:
    """Return the weight files: those the index names, else every model*.safetensors.

    `names` lists the repository; `index` is the text of its index when it has one. Raises
    NoWeights, or Malformed when the index names a file that is not there.
    """
    if index is None:
        files = [name for name in names if _WEIGHTS.fullmatch(name) and is_safe_file(name)]
    else:
        files = list(set(index_map(index).values()))
        if missing := sorted(set(files) - set(names)):
            raise Malformed(f"it names {missing[0][:80]!r}, which the repository does not hold")
    if not files:
        raise NoWeights
    if len(files) > MAX_FILES:
        raise Malformed(f"the weights are spread over {len(files)} files")
    return sorted(files)


def index_map(index: bytes) -> dict[str, str]:
    """Return tensor name -> file name from an index's text. Raises Malformed."""
    weight_map = parse_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Malformed("it has no weight_map")
    for file in set(map(str, weight_map.values())):
        if not is_safe_file(file) or not file.endswith(".safetensors"):
            raise Malformed(f"it names the file {file[:80]!r}")
    return weight_map


def needed_files(facts: ModelFacts, layers: Layers | None) -> list[ModelFile]:
    """Return the files a stage needs, or all of them for no range. Ordered by name.

    Raises ValueError when the model has fewer layers.
    """
    if layers is None:
        return list(facts.files)
    count = len(facts.layer_bytes)
    if layers.end > count:
        raise ValueError(f"the model has {count} layers")
    return [
        file
        for file in facts.files
        if file.every_stage
        or (file.first_stage and layers.start == 0)
        or (file.last_stage and layers.end == count)
        or any(layers.start <= layer < layers.end for layer in file.layers)
    ]
