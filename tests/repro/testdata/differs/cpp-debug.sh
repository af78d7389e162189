# SPDX-License-Identifier: Apache-2.0
# Debug information names the directory of the compilation.
# Cause: path
# Factor: path
# Needs: g++
cat > main.cc <<'E'
namespace n { int twice(int x) { return 2 * x; } }
E
g++ -g -c main.cc -o out
