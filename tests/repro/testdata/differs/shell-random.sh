# SPDX-License-Identifier: Apache-2.0
# The shell seeds its random numbers by the time, its process ID, its user and an address.
# Cause: random
# Factor: time, user, aslr, pids
# Needs: bash
bash -c 'echo $RANDOM' > out
