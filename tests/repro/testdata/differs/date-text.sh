# SPDX-License-Identifier: Apache-2.0
# A text contains the time of the run.
# Cause: timestamp
# Factor: time
# Needs: date
date -u > out
