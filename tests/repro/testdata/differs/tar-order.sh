# SPDX-License-Identifier: Apache-2.0
# The members of a tar archive are in the order of the directory.
# Cause: member order
# Factor: readdir
# Needs: tar
tar --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar -cf out names
