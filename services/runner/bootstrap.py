"""Wires a node's runner."""

from pathlib import Path

from services.common.channel import Remote
from services.common.server import Registration
from services.runner.adapters.calibration import CalibrationFile, measure_in_child
from services.runner.adapters.files import Files
from services.runner.app import Runner
from services.runner.calibrator import Calibrator
from services.runner.rpc.engine_ports import EnginePorts
from services.runner.rpc.instance_service import InstanceServicer
from services.runner.rpc.mlx_engine import mlx_engine_registration
from services.runner.rpc.shard_service import ShardServicer
from shardring.runner.v1 import instance_service_pb2_grpc, shard_service_pb2_grpc


def build_runner(node_id: str, downloads: Remote, host: str) -> tuple[Runner, list[Registration]]:
    """Return a node's runner and its gRPC services. Close the runner before the server.

    On `host` each READY instance that the node heads is served to gateways, at a port of its own.
    """
    runner = Runner(node_id, Files(node_id, downloads))
    runner.on_head = EnginePorts(runner, host).serve
    return runner, registrations(runner)


def build_calibrator(runner: Runner, data_folder: Path, fingerprint: str) -> Calibrator:
    """Return what finds out how fast the machine with this fingerprint is, once `run`."""
    return Calibrator(
        CalibrationFile(data_folder / "calibration.json", fingerprint),
        measure_in_child,
        idle=lambda: runner.idle,
        changes=runner.changes,
    )


def registrations(runner: Runner) -> list[Registration]:
    """Return the gRPC services of a runner."""
    return [
        Registration(
            "shardring.runner.v1.InstanceService",
            lambda server: instance_service_pb2_grpc.add_InstanceServiceServicer_to_server(
                InstanceServicer(runner), server
            ),
        ),
        Registration(
            "shardring.runner.v1.ShardService",
            lambda server: shard_service_pb2_grpc.add_ShardServiceServicer_to_server(
                ShardServicer(runner), server
            ),
        ),
        mlx_engine_registration(runner),
    ]
