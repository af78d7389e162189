# SPDX-License-Identifier: Apache-2.0
# A .pyc file contains the time of its source.
# Cause: timestamp
# Factor: time
# Needs: python3
echo 'x = 1' > module.py
/usr/bin/python3 -c 'import py_compile; py_compile.compile("module.py", cfile="out", dfile="module.py", invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)'
