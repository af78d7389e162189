# What differs lies in an archive in an archive.
# Cause: timestamp
# Factor: time
# Needs: zip
echo member > member.txt
zip -q -X inner.zip member.txt
touch -d @315619200 inner.zip
zip -q -X outer.zip inner.zip
mv outer.zip out
