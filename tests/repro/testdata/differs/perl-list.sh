# SPDX-License-Identifier: Apache-2.0
# A list whose last item has no comma is in the order of a hash table.
# Cause: hash seed
# Factor: random
# Needs: perl
PERL_PERTURB_KEYS=0 perl -MData::Dumper -e '$Data::Dumper::Indent = 1; print Dumper({map {$_ => 1} qw(alpha beta gamma delta epsilon zeta)})' > out
