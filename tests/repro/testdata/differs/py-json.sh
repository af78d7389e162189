# SPDX-License-Identifier: Apache-2.0
# A JSON field contains the time of the run.
# Cause: timestamp
# Factor: time
# Needs: python3
/usr/bin/python3 -c 'import json, time; json.dump({"name": "app", "built": int(time.time())}, open("out", "w"))'
