#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs the hermetic steps of a repository in any CI system, and explains the exit code. MODE and OUT are optional.
set -u
cloister gate --mode "${MODE:-enforce}" --out "${OUT:-artifacts/governance/hermetic-ci}"
code=$?
case $code in
0) ;;
1) echo "hermetic gate: a step failed" >&2 ;;
2) echo "hermetic gate: correct the policy" >&2 ;;
3) echo "hermetic gate: this runner cannot enforce it; see cloister check" >&2 ;;
4) echo "hermetic gate: a step touched the network or listened on it; see report.md in the evidence" >&2 ;;
*) echo "hermetic gate: stopped" >&2 ;;
esac
exit $code
