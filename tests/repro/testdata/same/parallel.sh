# SPDX-License-Identifier: Apache-2.0
# Results of several processes in numerical order.
# Needs: python3
cat > main.py <<'E'
import os
children = []
for n in range(8):
    pid = os.fork()
    if pid == 0:
        open("part%d" % n, "w").write("part %d\n" % n)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
open("out", "w").write("".join(open("part%d" % n).read() for n in range(8)))
E
/usr/bin/python3 main.py
