# SPDX-License-Identifier: Apache-2.0
# A directory, listed in order.
# Needs: ls
LC_ALL=C ls names > out
