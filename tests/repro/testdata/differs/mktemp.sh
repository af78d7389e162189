# SPDX-License-Identifier: Apache-2.0
# The output names a temporary file. The C library derives the name from the monotonic clock, which cannot be held.
# Cause: path
# Factor: none
# Needs: mktemp
echo "made by way of $(mktemp)" > out
