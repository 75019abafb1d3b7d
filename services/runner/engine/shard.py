"""One rank's engine: its place in the ring, its stage, its tokenizer, and the requests it runs."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils
from opentelemetry import trace

from services.common.errors import Reason
from services.runner.child_protocol import Event, Finished, Followed, Progress, Run, Tokens
from services.runner.domain.request import Input, Sampling
from services.runner.engine import generation, tensor
from services.runner.engine.loader import WeightsMissing, load_stage
from services.runner.engine.ring import Ring
from services.runner.engine.stage import Stage, StagesUnsupported
from services.runner.engine.tensor import TensorUnsupported, load_tensor
from services.runner.engine.text import Tokenizer

tracer = trace.get_tracer(__name__)

_WARM_UP_PROMPT = [0, 0, 0, 0]
_WARM_UP_TOKENS = 2


class LoadError(Exception):
    """The model cannot run on this rank, for a documented reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Cancelled(Exception):
    """Ends a generation from inside a progress callback."""


class ShardEngine:
    """Everything MLX of one rank. All calls but `prepare` and `cancel` come from one thread."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._ring: Ring | None = None
        self._stage: Stage | None = None
        # Instead of a stage, where every layer is split.
        self._split: nn.Module | None = None
        self._tokenizer: Tokenizer | None = None
        self._is_head = True
        self._expected: set[str] = set()
        self._cancelled: set[str] = set()
        utils.maybe_set_recommended_wired_limit()

    @property
    def has_chat_template(self) -> bool:
        """True on a head whose model brings a chat template."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def connect(self, rank: int, hosts: tuple[str, ...]) -> None:
        """Join the ring; no hosts: a ring of one."""
        self._is_head = rank == 0
        if hosts:
            self._ring = Ring(rank, hosts)

    def load(self, path: Path, start: int, end: int, *, tensor: bool = False) -> int:
        """Load layers [start, end), and the tokenizer on the head; return bytes in memory.

        `tensor`: this rank's part of each layer. Raises LoadError.
        """
        try:
            if tensor and self._ring is not None:
                self._split = load_tensor(path, self._ring)
            else:
                self._stage = load_stage(path, start, end)
            if self._is_head:
                self._tokenizer = Tokenizer(path)
        except StagesUnsupported as error:
            raise LoadError(Reason.STAGES_UNSUPPORTED, _one_node(str(error))) from error
        except TensorUnsupported as error:
            text = f"This model cannot be tensor-sharded over this ring ({error})."
            raise LoadError(Reason.SHARDING_UNSUPPORTED, text) from error
        except (WeightsMissing, FileNotFoundError) as error:
            raise LoadError(Reason.MODEL_MALFORMED, str(error)) from error
        return int(mx.get_active_memory())

    def warm_up(self) -> int:
        """Run a first request through the whole ring; return bytes in memory.

        Raises LoadError when the numbers that come out are none.
        """
        try:
            if self._is_head:
                prompt, count = list(_WARM_UP_PROMPT), _WARM_UP_TOKENS
                for _ in self._generate(prompt, Sampling(), count):
                    pass
                if self._ring is None:
                    self._check_alone()
            else:
                self._follow(Sampling(), check=True)
        except FloatingPointError as error:
            if self._ring is None:
                raise LoadError(Reason.MODEL_MALFORMED, str(error)) from error
            raise LoadError(Reason.STAGES_UNSUPPORTED, _one_node(str(error))) from error
        except (StagesUnsupported, TypeError, ValueError, AttributeError) as error:
            # What a layer says that is given another number of values than it takes.
            raise LoadError(Reason.STAGES_UNSUPPORTED, _one_node(str(error))) from error
        mx.clear_cache()
        return int(mx.get_active_memory())

    def prepare(self, given: Input) -> tuple[int, ...]:
        """Return the prompt's tokens, on the head. Raises ShardringError."""
        assert self._tokenizer is not None
        return self._tokenizer.prepare(given)

    def expect(self, request_id: str) -> None:
        """Note that a `run` of this request will come, so that it can be cancelled before."""
        self._expected.add(request_id)

    def cancel(self, request_id: str) -> None:
        """End an expected or running request at its next token."""
        self._cancelled |= {request_id} & self._expected

    def run(self, request: Run) -> None:
        """Work on a request until it ends; send what comes of it, or that this rank followed."""
        if self._is_head:
            finished = self._run_as_head(request)
            self._expected.discard(request.request_id)
            self._cancelled.discard(request.request_id)
            self._send(finished)
        else:
            with tracer.start_as_current_span("stage") as span:
                counts = self._follow(request.sampling)
                span.set_attributes({"prompt_tokens": counts[0], "completion_tokens": counts[1]})
            self._send(Followed(request.request_id))

    def _follow(self, sampling: Sampling, *, check: bool = False) -> tuple[int, int]:
        assert self._ring is not None
        if self._split is not None:
            return tensor.follow(self._split, self._ring)
        assert self._stage is not None
        return generation.follow(self._stage, self._ring, sampling, check=check)

    def _run_as_head(self, request: Run) -> Finished:
        assert self._tokenizer is not None
        request_id, prompt = request.request_id, list(request.prompt_token_ids)
        limit = self._tokenizer.room(len(prompt))
        if request.max_token_count:
            limit = min(limit, request.max_token_count)
        text, count, reason = self._tokenizer.detokenizer(), 0, "length"
        began = time.perf_counter()
        first = None
        prefill = tracer.start_span("prefill", attributes={"prompt_tokens": len(prompt)})
        decode = None
        try:
            stream = self._generate(prompt, request.sampling, limit, request_id)
            with closing(stream):
                for token in stream:
                    if first is None:
                        first = time.perf_counter()
                        prefill.end()
                        decode = tracer.start_span("decode")
                    if token in self._tokenizer.end_token_ids:
                        reason = "stop"
                        break
                    count += 1
                    text.add_token(token)
                    self._send(Tokens(request_id, (token,), text.last_segment))
                    self._raise_if_cancelled(request_id)
        except _Cancelled:
            reason = "cancelled"
        finally:
            ended = time.perf_counter()
            if decode is None:
                prefill.end()
            else:
                decode.set_attribute("completion_tokens", count)
                decode.end()
        text.finalize()
        return Finished(
            request_id,
            reason,
            text.last_segment,
            count,
            (first or ended) - began,
            ended - (first or ended),
        )

    def _generate(
        self, prompt: list[int], sampling: Sampling, limit: int, request_id: str = ""
    ) -> Generator[int, None, None]:
        """Yield token ids; a request without an id is the warm-up, whose numbers are checked."""

        def on_progress(done: int) -> None:
            if request_id:
                self._send(Progress(request_id, done))
                self._raise_if_cancelled(request_id)

        if self._split is not None:
            assert self._ring is not None
            return tensor.generate_as_head(
                self._split, self._ring, prompt, sampling, limit, on_progress, check=not request_id
            )
        assert self._stage is not None
        if self._ring is None:
            return generation.generate_alone(self._stage, prompt, sampling, limit, on_progress)
        return generation.generate_as_head(self._stage, self._ring, prompt, limit, on_progress)

    def _raise_if_cancelled(self, request_id: str) -> None:
        if request_id in self._cancelled:
            raise _Cancelled

    def _check_alone(self) -> None:
        assert self._stage is not None
        logits = self._stage(mx.array([_WARM_UP_PROMPT]), self._stage.make_cache())
        generation.check_logits(logits)


def _one_node(why: str) -> str:
    return f"This architecture cannot be cut into stages ({why}); place it on one node."
