// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/polygon.h"

#include "examples/geometry/segment.h"

namespace geometry {

int64_t TwiceArea(const Polygon& p) {
  int64_t sum = 0;
  for (size_t i = 0; i < p.size(); i++) sum += Turn({0, 0}, p[i], p[(i + 1) % p.size()]);
  return sum;
}

bool Contains(const Polygon& p, Point q) {
  bool inside = false;
  for (size_t i = 0; i < p.size(); i++) {
    const Point a = p[i], b = p[(i + 1) % p.size()];
    if (Segment{a, b}.Contains(q)) return true;
    // Half-open in y, so that a ray through a corner crosses it once.
    if ((a.y > q.y) != (b.y > q.y) && (Turn(a, b, q) > 0) == (b.y > a.y)) inside = !inside;
  }
  return inside;
}

}  // namespace geometry
