#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment of its own, installs the package into it without a network, runs its tests there, and
# leaves a report. From the root of the repository:
#
#	cloister run --git . --seed 7 --out report.json -- sh examples/python/run.sh
set -eu
here=$(dirname "$0")

# The host's Python, whatever PATH says: it is what the sandbox has of it. Outside of the inputs, which are read-only.
/usr/bin/python3 -m venv --without-pip "$TMPDIR/venv"
python=$TMPDIR/venv/bin/python

# What pip would do with a package that has neither dependencies nor anything to build: its files, where Python looks.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here/tally" "$site/tally"

# -I: neither the working directory nor variables decide on what is imported. -B: nothing is written beside the sources.
# What the tests print says how long they took, which differs from run to run: it is shown if they fail.
if ! "$python" -I -B -m unittest discover -s "$here/tests" 2> "$TMPDIR/tests.txt"; then
	cat "$TMPDIR/tests.txt" >&2
	exit 1
fi
"$python" -I -B -m tally "$here"/tally/*.py > report.json
