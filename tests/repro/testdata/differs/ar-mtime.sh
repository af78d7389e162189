# An archive keeps the times of its members.
# Cause: timestamp
# Factor: time
# Needs: ar
echo member > member.txt
ar rcU out member.txt
