# SPDX-License-Identifier: Apache-2.0
# An archive keeps the modes of its members, which the umask decides.
# Cause: file mode
# Factor: umask
# Needs: tar
echo member > member.txt
tar --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar -cf out member.txt
