#!/bin/sh
# Fails when the checked-in generated code is not what the protos give. Run by `make check`.
set -eu
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
cp -R protos/gen/python "$kept"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python protos/generate.py
diff -r -x __pycache__ "$kept/python" protos/gen/python || {
	echo "protos/gen was not up to date; it is now. Commit it." >&2
	exit 1
}
