# SPDX-License-Identifier: Apache-2.0
# A zip archive keeps the times of its members.
# Cause: timestamp
# Factor: time
# Needs: zip
echo member > member.txt
chmod 644 member.txt
TZ=UTC zip -q -X out.zip member.txt
mv out.zip out
