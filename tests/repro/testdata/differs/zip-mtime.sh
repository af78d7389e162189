# An archive keeps the times of its members.
# Cause: timestamp
# Factor: time
# Needs: zip
echo member > member.txt
zip -q -X out.zip member.txt
mv out.zip out
