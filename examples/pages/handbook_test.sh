#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# The directory has one page per heading, and the table of contents names each.
set -euo pipefail

cd examples/pages
[[ $(ls handbook) == $'page1.md\npage2.md\npage3.md' ]]
[[ $(head -n 1 handbook/page3.md) == '# Asking why' ]]
[[ $(cat handbook_contents.txt) == $'page1.md: Starting\npage2.md: Building\npage3.md: Asking why' ]]
