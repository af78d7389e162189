# SPDX-License-Identifier: Apache-2.0
# An ar archive without D keeps the times and owners of its members.
# Cause: timestamp, owner
# Factor: time, user
# Needs: ar
echo member > member.txt
chmod 644 member.txt
ar rcU out member.txt
