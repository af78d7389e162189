# SPDX-License-Identifier: Apache-2.0
# A hash is in the order of its seed, which is random. By default addresses and the number of variables
# have a part in it as well.
# Cause: hash seed
# Factor: random
# Needs: perl
PERL_PERTURB_KEYS=0 perl -e 'my %h = map { $_ => 1 } qw(alpha beta gamma delta epsilon zeta eta theta); print "$_\n" for keys %h' > out
