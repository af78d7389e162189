# SPDX-License-Identifier: Apache-2.0
# A Java archive with fixed times.
# Needs: jar
echo member > member.txt
jar -c -f out.jar --date=2001-09-09T01:46:40Z member.txt
mv out.jar out
