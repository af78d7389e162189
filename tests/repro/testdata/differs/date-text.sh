# SPDX-License-Identifier: Apache-2.0
# The time of the run is in a text.
# Cause: timestamp
# Factor: time
# Needs: date
date -u > out
