# SPDX-License-Identifier: Apache-2.0
# A tar archive keeps the modes of its members, which depend on the umask.
# Cause: file mode
# Factor: umask
# Needs: tar
echo member > member.txt
tar --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar -cf out member.txt
