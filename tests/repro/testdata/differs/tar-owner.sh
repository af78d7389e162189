# An archive keeps the owner of its members.
# Cause: owner
# Factor: user
# Needs: tar
echo member > member.txt
tar --mtime=@0 --format=ustar -cf out member.txt
