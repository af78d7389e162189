# SPDX-License-Identifier: Apache-2.0
# A tar archive keeps the times of its members.
# Cause: timestamp
# Factor: time
# Needs: tar
echo member > member.txt
chmod 644 member.txt
tar --owner=0 --group=0 --numeric-owner --format=ustar -cf out member.txt
