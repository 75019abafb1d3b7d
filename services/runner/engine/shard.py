"""One rank's engine: its place in the ring, its part of the model, its tokenizer, its work."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils

from services.common.errors import Reason
from services.common.telemetry import trace_headers
from services.runner.child_protocol import Cancel, Event, Load, Run
from services.runner.domain.cache_room import CacheCost, CacheRoom
from services.runner.domain.request import GenerationRequest, Sampling
from services.runner.domain.schedule import PREFILL_CHUNK_TOKENS, Schedule
from services.runner.domain.steps import Command
from services.runner.engine.follower import Follower
from services.runner.engine.head import Head, details
from services.runner.engine.inbox import Inbox
from services.runner.engine.lanes import CachesNotQuantizable, can_batch, cost_of
from services.runner.engine.line import Alone, Line, Pipeline, Split
from services.runner.engine.loader import WeightsMissing, load_stage
from services.runner.engine.ring import Ring
from services.runner.engine.spans import SequenceSpans
from services.runner.engine.stage import StagesUnsupported
from services.runner.engine.tensor import TensorUnsupported, load_tensor
from services.runner.engine.text import Tokenizer
from services.runner.engine.work import Model, Work

_WARM_UP_PROMPT_TOKENS = 4
_WARM_UP_TOKENS = 2
_KIB = 1024
# Kinds of caches by window that ranks tell each other about.
_TOLD_KINDS = 4
# Stands for caches that can be cut back at any length.
_ANY = -1


class LoadError(Exception):
    """The model cannot run on this rank, for a documented reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ShardEngine:
    """Everything MLX of one rank. All calls but `prepare` and `tell` come from one thread."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._ring: Ring | None = None
        self._model: Model | None = None
        self._load: Load | None = None
        self._work: Work | None = None
        self._line: Line | None = None
        self._tokenizer: Tokenizer | None = None
        self._costs: list[CacheCost] = []
        self._batched = True
        self._rank = 0
        self._inbox: Inbox[Run | Cancel] = Inbox()
        utils.maybe_set_recommended_wired_limit()

    @property
    def has_chat_template(self) -> bool:
        """True on a head whose model brings a chat template."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def connect(self, rank: int, hosts: tuple[str, ...]) -> None:
        """Join the ring; no hosts: a ring of one."""
        self._rank = rank
        if hosts:
            self._ring = Ring(rank, hosts)

    def load(self, command: Load) -> int:
        """Load this rank's part of the model, and the tokenizer on the head; return bytes in
        memory. Raises LoadError."""
        path = Path(command.path)
        try:
            if command.tensor and self._ring is not None:
                self._model = load_tensor(path, self._ring)
            else:
                self._model = load_stage(path, command.start, command.end)
            if self._rank == 0:
                self._tokenizer = Tokenizer(path)
        except StagesUnsupported as error:
            raise LoadError(Reason.STAGES_UNSUPPORTED, _not_cut(str(error))) from error
        except TensorUnsupported as error:
            text = f"This model cannot be tensor-sharded over this ring ({error})."
            raise LoadError(Reason.SHARDING_UNSUPPORTED, text) from error
        except (WeightsMissing, FileNotFoundError) as error:
            raise LoadError(Reason.MODEL_MALFORMED, str(error)) from error
        self._load = command
        self._prepare_work(command)
        return int(mx.get_active_memory())

    def _prepare_work(self, command: Load) -> None:
        assert self._model is not None
        ring, is_split = self._ring, command.tensor and self._ring is not None
        self._work = Work(
            self._model,
            hands_on=ring is not None and not is_split and not ring.is_last,
            # Of ranks that all have the logits, one chooses.
            chooses=self._rank == 0 if is_split else ring is None or ring.is_last,
            spans=SequenceSpans(self._rank),
            cache_bits=command.cache_bits,
            max_cache_tokens=command.max_cache_tokens,
        )
        if self._rank == 0:
            if ring is None:
                self._line = Alone(self._work)
            else:
                self._line = Split(self._work, ring) if is_split else Pipeline(self._work, ring)

    def warm_up(self) -> tuple[int, float]:
        """Run a first request through the whole ring; return bytes in memory, and how long a
        chunk of a prompt took (only known on the head).

        Raises LoadError when the numbers that come out are none.
        """
        assert self._work is not None
        self._work.checking = True
        began = time.perf_counter()
        try:
            cost = self._warm_up_as_head() if self._rank == 0 else self._warm_up_as_follower()
        except FloatingPointError as error:
            if self._ring is None:
                raise LoadError(Reason.MODEL_MALFORMED, str(error)) from error
            raise LoadError(Reason.STAGES_UNSUPPORTED, _not_cut(str(error))) from error
        except CachesNotQuantizable as error:
            raise LoadError(Reason.INVALID_FIELD, _not_quantizable(str(error))) from error
        except (StagesUnsupported, TypeError, ValueError, AttributeError) as error:
            if self._work.lanes.bits:
                # Some architectures' attention takes no quantized caches.
                raise LoadError(Reason.INVALID_FIELD, _not_quantizable(str(error))) from error
            # What a layer says that is given another number of values than it takes.
            raise LoadError(Reason.STAGES_UNSUPPORTED, _not_cut(str(error))) from error
        seconds = time.perf_counter() - began
        self._work.checking = False
        self._share_costs(cost)
        self._work.cache_limit_bytes = self._costs[self._rank].limit_bytes
        mx.clear_cache()
        return int(mx.get_active_memory()), seconds

    def _warm_up_as_head(self) -> CacheCost:
        assert self._line is not None
        assert self._tokenizer is not None
        assert self._work is not None
        line, context = self._line, self._tokenizer.context_token_count
        chunk = min(PREFILL_CHUNK_TOKENS, context // 2 if context else PREFILL_CHUNK_TOKENS)
        prompt = [0] * max(_WARM_UP_PROMPT_TOKENS, chunk)
        opened = [Command.OPEN, 0, 0, 0, details(Sampling(), prompt, None, trace_headers())]
        line.prefill([opened], 0, prompt[:-1])
        line.take()
        commands = [[Command.JOIN, 0, 0]]
        token = prompt[-1]
        for _ in range(_WARM_UP_TOKENS):
            line.decode(commands, 0, [token], 1, 1)
            commands, (token,) = [], line.take()
        cost = self._cost(self._work.lanes.lane(0)[1])
        line.tidy([[Command.LEAVE, 0, 0, 0]])
        return cost

    def _warm_up_as_follower(self) -> CacheCost:
        assert self._ring is not None
        assert self._work is not None
        follower = self._follower()
        cost: CacheCost | None = None
        while cost is None or self._work.sequence_count:
            self._ring.wait()
            follower.step()
            if 0 in self._work.lanes.lane_ids:
                cost = self._cost(self._work.lanes.lane(0)[1])
        return cost

    def _cost(self, cache: list[Any]) -> CacheCost:
        """Return what sequences cost here, judged by a first one's caches."""
        assert self._load is not None
        assert self._model is not None
        limit = min(self._load.cache_limit_bytes, _device_bytes_left())
        self._batched = self._model.can_batch and can_batch(cache)
        return cost_of(cache, limit)

    def _share_costs(self, cost: CacheCost) -> None:
        """Have every rank know what sequences cost on each; only the head uses it."""
        if self._ring is None:
            self._costs = [cost]
            return
        # In KiB: what ranks exchange are 32-bit numbers.
        told_kinds = cost.kinds_at_most(_TOLD_KINDS)
        kinds = [n for kind in told_kinds for n in kind]
        kinds += [0] * (2 * _TOLD_KINDS - len(kinds))
        limit = min(cost.limit_bytes // _KIB, 2**31 - 1)
        below = _ANY if cost.trimmable_below is None else cost.trimmable_below
        told = [int(self._batched), -(-cost.fixed_bytes // _KIB), limit, below, *kinds]
        rows = self._ring.gather(told)
        self._batched = all(row[0] for row in rows)
        self._costs = [
            CacheCost(
                fixed * _KIB,
                tuple((row[i], row[i + 1]) for i in range(0, len(row), 2) if row[i]),
                limit * _KIB,
                None if below == _ANY else below,
            )
            for _, fixed, limit, below, *row in rows
        ]

    def serve(self) -> None:
        """Work on requests until something fails, which is raised."""
        if self._rank:
            self._follower().serve()
        else:
            self.head().serve(self._inbox)

    def head(self) -> Head:
        """Return what serves requests on rank 0, after the warm-up."""
        assert self._line is not None
        assert self._work is not None
        assert self._tokenizer is not None
        size = 1 if self._ring is None else self._ring.size
        is_pipeline = isinstance(self._line, Pipeline)
        # A lane for each stage: more of them would be smaller, and cost more in all.
        lane_count = size if is_pipeline else 1
        room = CacheRoom(self._costs)
        schedule = Schedule(
            room,
            lane_count=lane_count,
            window=lane_count + 1,
            ahead=self._line.is_ahead,
            batched=self._batched,
        )
        return Head(
            self._line,
            self._work,
            schedule,
            room,
            self._tokenizer,
            self._send,
            exact_alone=mx.default_device() != mx.Device(mx.cpu),
        )

    def _follower(self) -> Follower:
        assert self._ring is not None
        assert self._work is not None
        assert self._load is not None
        return Follower(self._work, self._ring, self._send, is_split=self._load.tensor)

    def prepare(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the prompt's tokens, on the head. Raises ShardringError."""
        assert self._tokenizer is not None
        return self._tokenizer.prepare(request.input, request.sampling)

    def tell(self, item: Run | Cancel) -> None:
        """Hand the head a request, or that one is to end. From any thread."""
        self._inbox.put(item)


def _device_bytes_left() -> int:
    """Return what a GPU may still be given; no limit on a CPU."""
    if mx.default_device() == mx.Device(mx.cpu):
        return sys.maxsize
    allowed = int(mx.device_info()["max_recommended_working_set_size"])
    return max(0, allowed - int(mx.get_active_memory()))


def _not_quantizable(why: str) -> str:
    return (
        f"options.cache_bits must be 0 with this model: its key-value caches cannot be quantized "
        f"({why})."
    )


def _not_cut(why: str) -> str:
    return f"This model cannot be cut like this ({why}); place it on fewer nodes, or on one."
