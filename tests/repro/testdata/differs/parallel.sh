# SPDX-License-Identifier: Apache-2.0
# Two processes race to write their output.
# Cause: parallel
# Factor: parallel
# Needs: python3
cat > main.py <<'E'
import os
# Each of the processes works for about as long as the others.
children = []
for n in range(48):
    pid = os.fork()
    if pid == 0:
        x = 0
        for i in range(60000):
            x += i
        with open("out", "a") as f:
            f.write("part %d\n" % n)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
E
/usr/bin/python3 main.py
