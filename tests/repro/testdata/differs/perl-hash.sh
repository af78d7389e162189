# SPDX-License-Identifier: Apache-2.0
# A Perl hash is in random order, which also depends on addresses and the number of variables.
# Cause: hash seed
# Factor: random
# Needs: perl
PERL_PERTURB_KEYS=0 perl -e 'my %h = map { $_ => 1 } qw(alpha beta gamma delta epsilon zeta eta theta); print "$_\n" for keys %h' > out
