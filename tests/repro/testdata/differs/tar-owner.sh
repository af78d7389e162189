# SPDX-License-Identifier: Apache-2.0
# A tar archive keeps the owner of its members.
# Cause: owner
# Factor: user
# Needs: tar
echo member > member.txt
chmod 644 member.txt
tar --mtime=@0 --format=ustar -cf out member.txt
