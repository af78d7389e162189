# SPDX-License-Identifier: Apache-2.0
# A .pyc file with the hash of its source.
# Needs: python3
echo 'x = 1' > module.py
/usr/bin/python3 -c 'import py_compile; py_compile.compile("module.py", cfile="out", dfile="module.py", invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)'
