# SPDX-License-Identifier: Apache-2.0
# A program of C++, stripped.
# Needs: g++
cat > main.cc <<'E'
template <class T> T twice(T x) { return x + x; }
int main() { return twice(0); }
E
g++ -O1 -s main.cc -o out
