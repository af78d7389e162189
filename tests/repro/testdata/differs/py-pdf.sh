# SPDX-License-Identifier: Apache-2.0
# A PDF document contains its creation time.
# Cause: timestamp
# Factor: time
# Needs: python3
cat > main.py <<'E'
import datetime
date = datetime.datetime.utcnow().strftime("D:%Y%m%d%H%M%SZ")
open("out", "w").write("%PDF-1.4\n1 0 obj\n<< /Producer (main) /CreationDate (" + date + ") >>\nendobj\ntrailer\n<< /Info 1 0 R >>\n%%EOF\n")
E
/usr/bin/python3 -W ignore main.py
