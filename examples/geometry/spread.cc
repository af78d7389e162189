// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/spread.h"

#include "examples/geometry/hull.h"
#include "examples/num/random.h"

namespace geometry {

Polygon RandomConvex(uint64_t seed, int n, int64_t size) {
  num::Random random(seed);
  std::vector<Point> points;
  for (int i = 0; i < n; i++) {
    const int64_t x = random.Below(size), y = random.Below(size);
    points.push_back({x, y});
  }
  return Hull(points);
}

}  // namespace geometry
