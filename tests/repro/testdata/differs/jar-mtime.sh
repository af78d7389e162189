# An archive of Java keeps the times of its members.
# Cause: timestamp
# Factor: time
# Needs: jar
echo member > member.txt
jar -c -f out.jar member.txt
mv out.jar out
