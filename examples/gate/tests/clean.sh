# SPDX-License-Identifier: Apache-2.0
# A test that needs nothing but its inputs.
set -eu
[ "$(sh tests/greet.sh world)" = "hello, world" ]
echo "passed"
