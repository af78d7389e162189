# The time of the run is in a text.
# Cause: timestamp
# Factor: time
# Needs: date
date -u > out
