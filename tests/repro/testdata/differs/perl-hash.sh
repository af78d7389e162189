# A hash is in the order of its seed, which is random.
# Cause: hash seed
# Factor: random
# Needs: perl
perl -e 'my %h = map { $_ => 1 } qw(alpha beta gamma delta epsilon zeta eta theta); print "$_\n" for keys %h' > out
