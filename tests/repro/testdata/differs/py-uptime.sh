# SPDX-License-Identifier: Apache-2.0
# The time since the host began is in the output.
# Cause: uptime
# Factor: uptime
# Needs: python3
/usr/bin/python3 -c 'import time; print("days up:", int(time.monotonic()) // 86400)' > out
