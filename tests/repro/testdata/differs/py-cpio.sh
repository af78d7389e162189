# SPDX-License-Identifier: Apache-2.0
# A cpio archive keeps the times, owners and modes of its members.
# Cause: timestamp, owner, file mode
# Factor: time, user, umask
# Needs: python3
echo one > a
cat > main.py <<'E'
import os

def member(name, s, data):
    numbers = (1, s.st_mode, s.st_uid, s.st_gid, 1, int(s.st_mtime), len(data), 0, 0, 0, 0, len(name) + 1, 0) if s else (0,) * 11 + (len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % n for n in numbers) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)

with open("out", "wb") as out:
    out.write(member("a", os.stat("a"), b"one\n") + member("TRAILER!!!", None, b""))
E
/usr/bin/python3 main.py
