#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -eu
for option; do
  case $option in
    --coverage_dir=*) dir=${option#*=} ;;
    --output_file=*) output=${option#*=} ;;
  esac
done
: > "$output"
test -z "${dir-}" || find "$dir" -name '*.gcov.json.gz' -exec zcat {} + >> "$output"
