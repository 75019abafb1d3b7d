#!/bin/sh
# Generate the API's Java code with protoc, and compile it with the libraries that Debian's
# packages put in /usr/share/java. Makes build/client, a script that runs the program.
set -eu
cd "$(dirname "$0")"
rm -rf build
mkdir -p build/generated build/classes
CLASS_PATH=
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub \
	protobuf guava perfmark-api proto-google-common-protos netty-buffer netty-codec \
	netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver netty-transport \
	geronimo-annotation-1.3-spec; do
	CLASS_PATH="$CLASS_PATH:${JAVA_LIBRARIES:-/usr/share/java}/$jar.jar"
done
protoc -I ../../protos -I ../protos --java_out=build/generated --grpc-java_out=build/generated \
	--plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
	shardring/common/v1/common.proto \
	shardring/topology/v1/topology.proto shardring/topology/v1/topology_service.proto \
	shardring/placement/v1/placement.proto shardring/placement/v1/placement_service.proto \
	shardring/runner/v1/runner.proto shardring/runner/v1/instance_service.proto \
	google/rpc/status.proto google/rpc/error_details.proto
# shellcheck disable=SC2046
javac -nowarn -proc:none -encoding UTF-8 -cp "$CLASS_PATH" -d build/classes \
	$(find build/generated -name '*.java') Client.java
cat >build/client <<END
#!/bin/sh
# The locale is for the arguments' encoding; the rest is for a quick start.
LC_ALL=\${LC_ALL:-C.UTF-8} exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto \\
	-cp "$PWD/build/classes$CLASS_PATH" Client "\$@"
END
chmod +x build/client
