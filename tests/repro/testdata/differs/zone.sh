# SPDX-License-Identifier: Apache-2.0
# A fixed time is printed as local time.
# Cause: time zone
# Factor: zone
# Needs: date
date -d @1000000000 '+%Y-%m-%d %H:%M' > out
