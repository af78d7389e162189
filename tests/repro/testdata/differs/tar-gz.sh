# SPDX-License-Identifier: Apache-2.0
# A member of a compressed tar archive differs.
# Cause: timestamp
# Factor: time
# Needs: tar
echo member > member.txt
chmod 644 member.txt
tar --owner=0 --group=0 --numeric-owner --format=ustar -cf - member.txt | gzip -n > out
