# SPDX-License-Identifier: Apache-2.0
# A Go map is iterated in random order.
# Cause: hash seed
# Factor: random
# Chance: threads of the runtime take from the same random numbers; how many depends on processors and timing
# Needs: go
./programs/mapiter 2> out
