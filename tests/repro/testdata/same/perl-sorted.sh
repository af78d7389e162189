# SPDX-License-Identifier: Apache-2.0
# The sorted keys of a hash.
# Needs: perl
perl -e 'my %h = map { $_ => 1 } qw(alpha beta gamma); print "$_\n" for sort keys %h' > out
