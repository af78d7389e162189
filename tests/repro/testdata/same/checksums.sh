# SPDX-License-Identifier: Apache-2.0
# Checksums of the inputs.
# Needs: sha256sum
(cd names && sha256sum *) | LC_ALL=C sort > out
