# The keys of a map, sorted.
# Needs: go
./programs/mapsorted > out
