#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# usage: make_table.sh LIST NAMES FACTORS TABLE; a line of LIST is: name symbol measures factor.
set -euo pipefail

{
    echo 'namespace units { enum Unit {'
    while read -r name _; do echo "k$name,"; done < "$1"
    echo 'kUnits }; }'
} > "$2"
while read -r _ symbol measures factor; do echo "{\"$symbol\", '$measures', $factor},"; done < "$1" > "$3"
{
    echo '| Unit | Symbol | Factor |'
    echo '|---|---|---|'
    while read -r name symbol _ factor; do echo "| $name | $symbol | $factor |"; done < "$1"
} > "$4"
