# All of the environment is in the output.
# Cause: environment
# Factor: environment
# Needs: env
env | sort > out
