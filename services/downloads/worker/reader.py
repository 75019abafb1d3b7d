"""Which commit a revision means, and what a model's files say: from disk, else from the hub."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf import json_format

from services.common.errors import Reason, ShardringError
from services.downloads.domain.card import license_of
from services.downloads.domain.facts import ModelText, model_facts
from services.downloads.domain.files import (
    CONFIG,
    INDEX,
    MAX_FILES,
    NoWeights,
    every_stage_files,
    weight_files,
)
from services.downloads.domain.header import Header, Malformed, parse_object
from services.downloads.domain.key_values import key_value_bytes_per_token
from services.downloads.domain.names import is_commit
from services.downloads.domain.records import ModelFacts
from services.downloads.rpc.convert import facts_from_proto, facts_to_proto
from services.downloads.worker.cache import Cache, Listing
from services.downloads.worker.engine import EngineSupport
from services.downloads.worker.listings import Repository
from services.downloads.worker.patience import Patience, patience, with_patience
from services.downloads.worker.sources import (
    DiskSource,
    Hub,
    HubSource,
    Source,
    read_header,
    read_text,
)
from shardring.downloads.v1 import downloads_pb2

logger = logging.getLogger(__name__)

_MAX_CONFIG_BYTES = 4 * 2**20
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_TOKENIZER_CONFIG_BYTES = 32 * 2**20
_PARALLEL_HEADERS = 8
# Several times what the largest models have.
_MAX_TENSORS = 500_000
_CARD = "README.md"
# Kept facts of another version lack something: they count only while nothing better is at hand.
_FACTS_VERSION = 2
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Known:
    """A model at one commit: its facts, and the hub's file list where that is known."""

    commit: str
    facts: ModelFacts
    listing: Listing | None


class ModelReader:
    """Reads models. All methods block; facts of a commit never change and are read once."""

    def __init__(self, cache: Cache, hub: Hub, engine: EngineSupport) -> None:
        self._cache = cache
        self._hub = hub
        self._engine = engine
        self._facts: dict[tuple[str, str], ModelFacts] = {}

    def read(self, model_id: str, revision: str) -> Known:
        """Return a model's facts; asks the hub unless the revision is a commit on disk.

        When the hub cannot be asked or does not know the model, what is on disk answers.
        Raises the hub's error when that is not enough.
        """
        if is_commit(revision) and (local := self.local(model_id, revision)):
            return local
        commit = self._cache.resolve(model_id, revision)
        local = None if commit is None else self.local(model_id, commit)
        try:
            # While the disk has an answer, a hub that has none is not waited for.
            with with_patience(patience() if local is None else None):
                repository = self._hub.repository(model_id, revision)
        except ShardringError:
            if local is not None:
                return local
            raise
        facts = self._from_hub(model_id, repository)
        return Known(repository.commit, facts, repository.listing)

    def from_hub(self, model_id: str, revision: str) -> Known:
        """Return a model's facts and file list as the hub has them now."""
        repository = self._hub.repository(model_id, revision)
        facts = self._from_hub(model_id, repository)
        return Known(repository.commit, facts, repository.listing)

    def local(self, model_id: str, commit: str) -> Known | None:
        """Return what is known without the hub; None when the disk holds too little."""
        listing = self._cache.listing(model_id, commit)
        facts = self._facts.get((model_id, commit)) or self._kept(model_id, commit)
        if facts is None:
            facts = self._from_disk(model_id, commit, listing)
        if facts is None:
            # Not remembered, so that the hub is read anew when it is asked.
            facts = self._kept(model_id, commit, outdated=True)
            return None if facts is None else Known(commit, facts, listing)
        self._facts[model_id, commit] = facts
        return Known(commit, facts, listing)

    def keep(self, model_id: str, known: Known) -> None:
        """Write facts and file list beside the model, for the time without the hub."""
        if known.listing is not None:
            self._cache.keep_listing(model_id, known.commit, known.listing)
        model = json_format.MessageToDict(facts_to_proto(known.facts))
        kept = {"version": _FACTS_VERSION, "engine": self._engine.version, "model": model}
        text = json.dumps(kept, indent=1)
        self._cache.keep_facts_text(model_id, known.commit, text)

    def forget(self, model_id: str) -> None:
        """Drop what is remembered of a model that was removed."""
        self._facts = {key: facts for key, facts in self._facts.items() if key[0] != model_id}

    def _kept(self, model_id: str, commit: str, *, outdated: bool = False) -> ModelFacts | None:
        """Return the facts kept beside the model, those of another version only when allowed."""
        if (text := self._cache.facts_text(model_id, commit)) is None:
            return None
        try:
            kept = parse_object(text.encode())
            # The first version was the model alone.
            model = kept.get("model") if "version" in kept else kept
            if not isinstance(model, dict):
                raise Malformed("it holds no model")
            message = json_format.ParseDict(
                model, downloads_pb2.Model(), ignore_unknown_fields=True
            )
        except (Malformed, json_format.ParseError) as error:
            logger.warning("The kept facts of %s are unreadable: %s", model_id, error)
            return None
        if kept.get("version") != _FACTS_VERSION and not outdated:
            return None
        facts = facts_from_proto(message)
        # The engine, and what is known of architectures, may have been updated since.
        config: dict[str, object] = {"model_type": facts.model_type}
        cuts = facts.cuts if kept.get("engine") == self._engine.version else None
        try:
            config = parse_object((self._cache.snapshot(model_id, commit) / CONFIG).read_bytes())
            cuts = cuts or self._engine.cuts(config, len(facts.layer_bytes))
        except (OSError, Malformed):
            logger.debug("%s has no readable config.json on disk", model_id)
        figures = (config, len(facts.layer_bytes), facts.hidden_bytes_per_value)
        return dataclasses.replace(
            facts,
            engine_supported=self._engine.supports(config),
            tensor_supported=self._engine.supports_tensor(config),
            key_value_bytes_per_token=key_value_bytes_per_token(*figures)
            or facts.key_value_bytes_per_token,
            cuts=cuts,
        )

    def _from_disk(self, model_id: str, commit: str, listing: Listing | None) -> ModelFacts | None:
        sizes = self._cache.sizes(model_id, commit)
        if CONFIG not in sizes:
            return None
        if listing is not None and any(
            sizes.get(name) != listing[name].size_bytes for name in every_stage_files(listing)
        ):
            return None
        source = DiskSource(self._cache.snapshot(model_id, commit), sizes)
        try:
            return self._facts_of(model_id, commit, source, "")
        except (ShardringError, OSError) as error:
            logger.debug("%s is not whole on disk: %s", model_id, error)
            return None

    def _from_hub(self, model_id: str, repository: Repository) -> ModelFacts:
        key = (model_id, repository.commit)
        facts = self._facts.get(key) or self._kept(model_id, repository.commit)
        if facts is None:
            sizes = {name: file.size_bytes for name, file in repository.listing.items()}
            source = HubSource(self._hub, model_id, repository.commit, sizes)
            facts = self._facts_of(model_id, repository.commit, source, repository.license)
        # What no file says, and the one fact that may change while the commit stays.
        facts = dataclasses.replace(facts, gated=repository.gated)
        self._facts[key] = facts
        return facts

    def _facts_of(
        self, model_id: str, commit: str, source: Source, license_name: str
    ) -> ModelFacts:
        """Read what `model_facts` needs. Raises MODEL_WITHOUT_WEIGHTS or MODEL_MALFORMED."""
        names = source.sizes
        if CONFIG not in names:
            raise _without_weights(model_id, "no config.json")
        with _blaming(model_id, INDEX):
            index = read_text(source, INDEX, _MAX_INDEX_BYTES) if INDEX in names else None
            weights = weight_files(list(names), index)
        with _blaming(model_id, CONFIG):
            config = parse_object(read_text(source, CONFIG, _MAX_CONFIG_BYTES))
        needed = {name: names[name] for name in (*every_stage_files(names), *weights)}
        if len(needed) > MAX_FILES:
            with _blaming(model_id, CONFIG):
                raise Malformed(f"{len(needed)} files belong to the model")
        if not license_name and isinstance(source, DiskSource) and _CARD in names:
            license_name = license_of(source.head(_CARD, 100_000).decode(errors="replace"))
        headers = _headers(model_id, source, weights)
        text = ModelText(
            model_id=model_id,
            commit=commit,
            config=config,
            headers=headers,
            sizes=needed,
            has_chat_template=_has_chat_template(model_id, source),
            license=license_name,
            engine_supported=self._engine.supports(config),
            tensor_supported=self._engine.supports_tensor(config),
        )
        with _blaming(model_id, CONFIG):
            facts = model_facts(text)
        return dataclasses.replace(facts, cuts=self._engine.cuts(config, len(facts.layer_bytes)))


def _headers(model_id: str, source: Source, names: Sequence[str]) -> dict[str, Header]:
    """Read the headers of weight files, several at a time. Raises MODEL_MALFORMED."""
    headers: dict[str, Header] = {}
    tensor_count = 0
    # Threads of a pool know nothing of the caller's patience.
    given = patience()
    with ThreadPoolExecutor(_PARALLEL_HEADERS) as pool:
        reading = [pool.submit(_header, model_id, source, name, given) for name in names]
        try:
            for name, header in zip(names, reading, strict=True):
                headers[name] = header.result()
                tensor_count += len(headers[name].tensors)
                if tensor_count > _MAX_TENSORS:
                    with _blaming(model_id, name):
                        raise Malformed(f"with it the model has over {_MAX_TENSORS} tensors")
        finally:
            # When one is refused, what has not begun is not read at all.
            pool.shutdown(wait=False, cancel_futures=True)
    return headers


def _header(model_id: str, source: Source, name: str, given: Patience) -> Header:
    with with_patience(given), _blaming(model_id, name):
        return read_header(source, name)


def _has_chat_template(model_id: str, source: Source) -> bool:
    if any(name in source.sizes for name in _TEMPLATES):
        return True
    name = "tokenizer_config.json"
    if name not in source.sizes:
        return False
    with _blaming(model_id, name):
        config = parse_object(read_text(source, name, _MAX_TOKENIZER_CONFIG_BYTES))
    return bool(config.get("chat_template"))


def _without_weights(model_id: str, why: str) -> ShardringError:
    return ShardringError(
        Reason.MODEL_WITHOUT_WEIGHTS,
        f"{model_id} has {why}, so it is no model that can run here. Look for one in mlx-lm's or "
        "transformers' layout: config.json and model*.safetensors.",
        metadata={"model_id": model_id},
    )


@contextmanager
def _blaming(model_id: str, file: str) -> Iterator[None]:
    """Turn Malformed into MODEL_MALFORMED naming the file."""
    try:
        yield
    except NoWeights as error:
        raise _without_weights(model_id, "no model*.safetensors") from error
    except Malformed as error:
        raise ShardringError(
            Reason.MODEL_MALFORMED,
            f"{file} of {model_id} is malformed: {error}.",
            metadata={"model_id": model_id, "file": file},
        ) from error
