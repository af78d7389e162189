# SPDX-License-Identifier: Apache-2.0
# The keys of a hash, sorted.
# Needs: perl
perl -e 'my %h = map { $_ => 1 } qw(alpha beta gamma); print "$_\n" for sort keys %h' > out
