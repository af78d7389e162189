# SPDX-License-Identifier: Apache-2.0
# What differs lies in an archive, in a compressed file.
# Cause: timestamp
# Factor: time
# Needs: tar
echo member > member.txt
chmod 644 member.txt
tar --owner=0 --group=0 --numeric-owner --format=ustar -cf - member.txt | gzip -n > out
