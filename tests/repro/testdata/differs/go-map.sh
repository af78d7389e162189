# A map is iterated in an order that is random.
# Cause: hash seed
# Factor: random
# Needs: go
./programs/mapiter > out
