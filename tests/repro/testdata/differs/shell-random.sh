# SPDX-License-Identifier: Apache-2.0
# The shell draws a number from a seed of its own: of the time, its process, its user and where in memory things lie.
# Cause: random
# Factor: time, user, aslr, pids
# Needs: bash
bash -c 'echo $RANDOM' > out
