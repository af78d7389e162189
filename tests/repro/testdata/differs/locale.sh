# SPDX-License-Identifier: Apache-2.0
# The character set is that of the locale.
# Cause: locale
# Factor: locale
# Needs: locale
echo "charset=$(locale charmap)" > out
