#!/bin/sh
# Generate the API's Go code with protoc, and build build/client with the libraries that Debian's
# packages put in /usr/share/gocode.
set -eu
cd "$(dirname "$0")"
rm -rf build
mkdir -p build/src
export GO111MODULE=off GOPATH="$PWD/build:/usr/share/gocode"
export GOFLAGS=
protoc -I ../../protos --go_out=build/src --go-grpc_out=build/src \
	shardring/common/v1/common.proto \
	shardring/topology/v1/topology.proto shardring/topology/v1/topology_service.proto \
	shardring/placement/v1/placement.proto shardring/placement/v1/placement_service.proto \
	shardring/runner/v1/runner.proto shardring/runner/v1/instance_service.proto
go build -o build/client .
