# SPDX-License-Identifier: Apache-2.0
# The name of a temporary file is in the output. The C library makes it of the monotonic clock, which nothing holds: runs
# of which nothing is varied differ, and no factor is named.
# Cause: path
# Factor: none
# Needs: mktemp
echo "made by way of $(mktemp)" > out
