#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Creates a virtual environment, installs the package into it without a network, runs its tests, and writes a report.
# Run it from the root of the repository:
#
#	cloister run --git . --seed 7 --out report.json -- sh examples/python/run.sh
set -eu
here=$(dirname "$0")

# Use the host's Python, since the sandbox has no other. The environment lies outside the read-only inputs.
/usr/bin/python3 -m venv --without-pip "$TMPDIR/venv"
python=$TMPDIR/venv/bin/python

# Do what pip would do with a package without dependencies or build steps: copy its files to where Python looks.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here/tally" "$site/tally"

# -I: ignore the working directory and variables when importing. -B: write nothing beside the sources.
# The output of the tests contains their duration, which differs in each run, so show it only if they fail.
if ! "$python" -I -B -m unittest discover -s "$here/tests" 2> "$TMPDIR/tests.txt"; then
	cat "$TMPDIR/tests.txt" >&2
	exit 1
fi
"$python" -I -B -m tally "$here"/tally/*.py > report.json
