#!/bin/sh
# Fetch the two libraries. The protos are read at run time, so nothing is generated.
set -eu
cd "$(dirname "$0")"
npm ci --silent
