# SPDX-License-Identifier: Apache-2.0
# A Java archive keeps the times of its members.
# Cause: timestamp
# Factor: time
# Needs: jar
echo member > member.txt
TZ=UTC jar -J-XX:TieredStopAtLevel=1 -c -f out.jar member.txt
mv out.jar out
