# SPDX-License-Identifier: Apache-2.0
# A member of an archive in an archive differs.
# Cause: timestamp
# Factor: time
# Needs: zip
echo member > member.txt
chmod 644 member.txt
export TZ=UTC
zip -q -X inner.zip member.txt
chmod 644 inner.zip
touch -d @315619200 inner.zip
zip -q -X outer.zip inner.zip
mv outer.zip out
