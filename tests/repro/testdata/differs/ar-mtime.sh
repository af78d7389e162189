# SPDX-License-Identifier: Apache-2.0
# An archive keeps the times of its members. It keeps their owner as well, unless it keeps nothing.
# Cause: timestamp, owner
# Factor: time, user
# Needs: ar
echo member > member.txt
chmod 644 member.txt
ar rcU out member.txt
