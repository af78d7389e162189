# SPDX-License-Identifier: Apache-2.0
# The output contains a process ID.
# Cause: process id
# Factor: pids
# Needs: sh
echo "pid $$" > out
