#!/bin/sh
# Generate the API's C++ code with protoc, and build build/client with Debian's grpc++.
set -eu
cd "$(dirname "$0")"
rm -rf build
mkdir -p build/generated
PROTOS="shardring/common/v1/common.proto
	shardring/topology/v1/topology.proto shardring/topology/v1/topology_service.proto
	shardring/placement/v1/placement.proto shardring/placement/v1/placement_service.proto
	shardring/runner/v1/runner.proto shardring/runner/v1/instance_service.proto
	google/rpc/status.proto google/rpc/error_details.proto"
# shellcheck disable=SC2086
protoc -I ../../protos -I ../protos --cpp_out=build/generated --grpc_out=build/generated \
	--plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" $PROTOS
# All generated code is compiled as one file, so that its long headers are read once. Two names are
# the same in each part of it.
{
	find build/generated -name '*.h' | sort | sed 's|build/generated/\(.*\)|#include "\1"|'
	find build/generated -name '*.cc' | sort | awk '{
		sub("build/generated/", "")
		print "#define schemas schemas_" NR
		print "#define file_default_instances file_default_instances_" NR
		print "#include \"" $0 "\""
		print "#undef schemas"
		print "#undef file_default_instances"
	}'
} >build/api.cc
FLAGS="-std=c++17 -O0 -Ibuild/generated $(pkg-config --cflags grpc++ protobuf)"
# shellcheck disable=SC2086
${CXX:-g++} $FLAGS -c build/api.cc -o build/api.o &
# shellcheck disable=SC2086
${CXX:-g++} $FLAGS -Wall -Wextra -c client.cc -o build/client.o
wait $!
# shellcheck disable=SC2046
${CXX:-g++} build/client.o build/api.o $(pkg-config --libs grpc++ protobuf) -o build/client
