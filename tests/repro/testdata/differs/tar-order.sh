# SPDX-License-Identifier: Apache-2.0
# An archive has its members in the order in which the directory lists them.
# Cause: member order
# Factor: readdir
# Needs: tar
tar --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar -cf out names
