# SPDX-License-Identifier: Apache-2.0
# The output contains the time since boot.
# Cause: uptime
# Factor: uptime
# Needs: python3
/usr/bin/python3 -c 'import time; print("days up:", int(time.monotonic()) // 86400)' > out
