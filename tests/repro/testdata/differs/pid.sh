# SPDX-License-Identifier: Apache-2.0
# The number of a process is in the output.
# Cause: process id
# Factor: pids
# Needs: sh
echo "pid $$" > out
