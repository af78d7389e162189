# SPDX-License-Identifier: Apache-2.0
# A zip archive with fixed times and modes.
# Needs: zip
echo member > member.txt
chmod 644 member.txt
touch -d @315619200 member.txt
TZ=UTC zip -q -X out.zip member.txt
mv out.zip out
