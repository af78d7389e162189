// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/spread.h"

#include "examples/check/check.h"

int main() {
  for (uint64_t seed = 0; seed < 20; seed++) {
    const geometry::Polygon p = geometry::RandomConvex(seed, 50, 1000);
    CHECK(p == geometry::RandomConvex(seed, 50, 1000));
    CHECK(geometry::TwiceArea(p) > 0);
    for (size_t i = 0; i < p.size(); i++) {
      CHECK(geometry::Turn(p[i], p[(i + 1) % p.size()], p[(i + 2) % p.size()]) > 0);
      CHECK(geometry::Contains(p, p[i]));
    }
  }
  return check::Failures();
}
