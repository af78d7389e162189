# SPDX-License-Identifier: Apache-2.0
# The date of the source, not of the run.
# Needs: date
date -u -d @1000000000 > out
