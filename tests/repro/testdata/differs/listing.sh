# SPDX-License-Identifier: Apache-2.0
# A list is in the order in which the directory lists it.
# Cause: member order
# Factor: readdir
# Needs: ls
ls -U names > out
