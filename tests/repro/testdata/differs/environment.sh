# SPDX-License-Identifier: Apache-2.0
# The output lists variables that the command does not set, except those of other factors.
# Cause: environment
# Factor: environment
# Needs: env
env -u PWD -u TZ -u LANG -u LC_ALL | LC_ALL=C sort > out
