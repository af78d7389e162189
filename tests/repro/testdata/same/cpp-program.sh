# SPDX-License-Identifier: Apache-2.0
# A stripped C++ program.
# Needs: g++
cat > main.cc <<'E'
template <class T> T twice(T x) { return x + x; }
int main() { return twice(0); }
E
g++ -O1 -s main.cc -o out
