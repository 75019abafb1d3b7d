#!/bin/sh
# Makes .venv with the locked dependencies and Shardring itself. Run by `make setup`.
set -eu
python="${PYTHON:-python3}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	echo "Shardring needs Python 3.11 or newer; $python is $("$python" -V 2>&1)." >&2
	echo "Name another one: make setup PYTHON=python3.12" >&2
	exit 1
}
if [ ! -x .venv/bin/pip ]; then
	rm -rf .venv
	if ! "$python" -c 'import ensurepip' 2>/dev/null; then
		# Debian and Ubuntu ship venv's other half as a package of its own.
		if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
			echo "Installing python3-venv ..."
			apt-get update -qq && apt-get install -qq -y python3-venv >/dev/null
		else
			echo "Python's venv module is incomplete. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2
			exit 1
		fi
	fi
	"$python" -m venv .venv
fi
echo "Installing the locked dependencies into .venv ..."
[ -x .venv/bin/uv ] || .venv/bin/pip install -q --disable-pip-version-check "$(grep '^uv==' requirements.lock)"
.venv/bin/uv pip sync -q --python .venv/bin/python requirements.lock
.venv/bin/uv pip install -q --python .venv/bin/python --no-deps -e .
touch .venv/.ready
