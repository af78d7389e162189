# SPDX-License-Identifier: Apache-2.0
# A list is in the order of the directory.
# Cause: member order
# Factor: readdir
# Needs: ls
ls -U names > out
