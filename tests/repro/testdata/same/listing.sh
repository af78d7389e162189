# SPDX-License-Identifier: Apache-2.0
# A sorted directory listing.
# Needs: ls
LC_ALL=C ls names > out
