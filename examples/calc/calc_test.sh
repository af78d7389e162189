#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# The program prints the value of each valid expression, and an error for each invalid one.
set -euo pipefail

calc=examples/calc/calc
[[ $("$calc" '1 + 2 * 3' 'max(4, 2) / 8') == $'7\n0.5' ]]
[[ $("$calc" '1 +' 2>&1 || true) == 'calc: 1 +: unexpected end' ]]
if "$calc" ')' 2> /dev/null; then
    echo "a lone parenthesis is no expression, but calc succeeded" >&2
    exit 1
fi
