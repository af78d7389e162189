# SPDX-License-Identifier: Apache-2.0
# A tar archive with all metadata fixed.
# Needs: tar
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar -cf out names
