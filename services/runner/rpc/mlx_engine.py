"""mlx.grpc.engine.MlxEngine, by which gateways such as smg drive an MLX engine.

It knows no instances. So each instance has a port of its own where MlxEngine is that instance
(`services.runner.rpc.engine_ports`). At the node's port it is the instance that the call's metadata
names, or else the only one there.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import grpc
from grpc.aio import ServicerContext
from smg_grpc_proto import mlx_engine_pb2 as pb
from smg_grpc_proto import mlx_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from services.common.errors import Reason, ShardringError
from services.common.server import Registration
from services.runner.adapters.model_files import model_facts, tokenizer_files
from services.runner.app import Runner, random_seed
from services.runner.domain.request import GenerationRequest
from services.runner.domain.state import InstanceState
from services.runner.requests import Completion, Part
from services.runner.rpc.mlx_convert import (
    chunk_to_proto,
    complete_to_proto,
    generation_from_proto,
    model_info_to_proto,
)
from services.runner.views import InstanceView

SERVICE_NAME = "mlx.grpc.engine.MlxEngine"
METADATA_KEY = "shardring-instance-id"
CHUNK_BYTES = 64 * 1024
SERVER_TYPE = "shardring"
# Put together for a client that is behind. With all log-probabilities it stays far below the 4 MB
# that gRPC clients take unless told otherwise.
_MERGED_PARTS = 512

Context = ServicerContext[Any, Any]


def mlx_engine_registration(runner: Runner, instance_id: str = "") -> Registration:
    """Return the service of one instance, or with "" of whichever a call means."""
    return Registration(
        SERVICE_NAME,
        lambda server: mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(
            MlxEngineServicer(runner, instance_id), server
        ),
    )


def meant_instance(views: Sequence[InstanceView], named: str) -> InstanceView:
    """Return the READY instance that a call to this node means; `named` empty: the only one.

    Raises ShardringError: INSTANCE_NOT_READY when there is none, INSTANCE_AMBIGUOUS when there
    are several.
    """
    ready = [
        view
        for view in views
        if view.rank == 0 and view.state is InstanceState.READY and named in ("", view.instance_id)
    ]
    if len(ready) == 1:
        return ready[0]
    if not ready:
        which = f"The instance {named}" if named else "No instance whose head is this node"
        raise ShardringError(
            Reason.INSTANCE_NOT_READY,
            f"{which} is {'not ' if named else ''}READY here.",
            metadata={"instance_id": named},
            retry_delay_seconds=2,
        )
    ids = ", ".join(sorted(view.instance_id for view in ready))
    raise ShardringError(
        Reason.INSTANCE_AMBIGUOUS,
        f"This node heads several instances: {ids}. Call an instance's own port, its "
        f"mlx_engine_port, or name one in the metadata {METADATA_KEY}.",
        metadata={"instance_ids": ids, "metadata_key": METADATA_KEY},
    )


class MlxEngineServicer(mlx_engine_pb2_grpc.MlxEngineServicer):  # type: ignore[misc]
    """Serves a Runner's instances; with `instance_id` that one only."""

    def __init__(self, runner: Runner, instance_id: str = "") -> None:
        self._runner = runner
        self._instance_id = instance_id
        self._calls: dict[str, set[asyncio.Task[None]]] = {}
        self._start = time.monotonic()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one answer: its tokens as they come where `stream` is set, and its end."""
        instance_id = self._meant(context).instance_id
        asked = generation_from_proto(request, random_seed())
        call = _Call(self._runner, instance_id, asked)
        calls = self._calls.setdefault(request.request_id, set())
        calls.add(call.task)
        prompt_count = len(asked.input.token_ids or ())
        held: list[Part] = []
        count = 0
        try:
            async with aclosing(call.parts()) as parts:
                async for part in parts:
                    if isinstance(part, Completion):
                        yield complete_to_proto(part, held)
                    elif not request.stream:
                        held.append(part)
                    elif part.token_ids:
                        count += len(part.token_ids)
                        yield chunk_to_proto(part, prompt_count, count)
        finally:
            calls.discard(call.task)
            if not calls and self._calls.get(request.request_id) is calls:
                del self._calls[request.request_id]
        if call.task.cancelled():
            await context.abort(grpc.StatusCode.CANCELLED, "The request was aborted.")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the requests of these ids; quiet about ids that no request has, and the empty one."""
        for request_id in filter(None, request.request_ids):
            for task in self._calls.get(request_id, ()):
                task.cancel()
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Say whether a request would be taken, and why not."""
        try:
            view = self._meant(context)
        except ShardringError as error:
            return pb.HealthCheckResponse(healthy=False, message=error.message)
        return pb.HealthCheckResponse(healthy=True, message=f"{view.instance_id} is READY")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Tell what model the instance runs."""
        view = self._meant(context)
        folder = self._runner.model_folder(view.instance_id)
        return model_info_to_proto(view.ring.model_id, await asyncio.to_thread(model_facts, folder))

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Tell how busy the instance is."""
        return pb.GetServerInfoResponse(
            server_type=SERVER_TYPE,
            active_requests=self._meant(context).request_count,
            uptime_seconds=time.monotonic() - self._start,
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send a zip of the tokenizer's files; its SHA-256 with the last chunk."""
        folder = self._runner.model_folder(self._meant(context).instance_id)
        files = await asyncio.to_thread(tokenizer_files, folder)
        for start in range(0, len(files.data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(files.data)
            yield common_pb2.GetTokenizerChunk(
                data=files.data[start : start + CHUNK_BYTES],
                sha256=files.sha256 if is_last else "",
            )

    def _meant(self, context: Context) -> InstanceView:
        named = self._instance_id
        if not named:
            metadata = dict(context.invocation_metadata() or ())
            named = str(metadata.get(METADATA_KEY, ""))
        return meant_instance(self._runner.list(), named)


class _Call:
    """One generation in a task of its own, so that another call can end it.

    The task is cancelled by an abort, and when `parts` is closed.
    """

    def __init__(self, runner: Runner, instance_id: str, request: GenerationRequest) -> None:
        self._queue: asyncio.Queue[Part | Completion | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._generate(runner, instance_id, request))
        self.task.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def parts(self) -> AsyncGenerator[Part | Completion, None]:
        """Yield what the generation yields, and raise what it raises; ends early when aborted."""
        try:
            ended = False
            while not ended:
                items = [await self._queue.get()]
                while not self._queue.empty():
                    items.append(self._queue.get_nowait())
                ended = items[-1] is None
                for part in _merged(items):
                    yield part
            if not self.task.cancelled():
                self.task.result()
        finally:
            self.task.cancel()
            await asyncio.wait([self.task])
            if not self.task.cancelled():
                # Looked at, so that nobody is warned of an error that nobody waits for any more.
                self.task.exception()

    async def _generate(self, runner: Runner, instance_id: str, request: GenerationRequest) -> None:
        async with aclosing(runner.generate(instance_id, request)) as parts:
            async for part in parts:
                self._queue.put_nowait(part)


def _merged(items: Sequence[Part | Completion | None]) -> Iterator[Part | Completion]:
    """Put together what a client that is behind has not been sent yet; leave out None."""
    for is_part, group in groupby(items, lambda item: isinstance(item, Part)):
        if not is_part:
            yield from (item for item in group if item is not None)
            continue
        parts = [item for item in group if isinstance(item, Part)]
        for start in range(0, len(parts), _MERGED_PARTS):
            yield _joined(parts[start : start + _MERGED_PARTS])


def _joined(parts: Sequence[Part]) -> Part:
    """Return parts of one choice, in order, as one."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    logprobs = None if first.logprobs is None else chain(*(part.logprobs or () for part in parts))
    return replace(
        first,
        token_ids=tuple(chain(*(part.token_ids for part in parts))),
        text="".join(part.text for part in parts),
        logprobs=None if logprobs is None else tuple(logprobs),
    )
