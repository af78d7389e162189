// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/box.h"

#include <algorithm>

namespace geometry {

bool Box::Contains(Point p) const { return low.x <= p.x && p.x <= high.x && low.y <= p.y && p.y <= high.y; }

bool Box::Meets(const Box& o) const {
  return low.x <= o.high.x && o.low.x <= high.x && low.y <= o.high.y && o.low.y <= high.y;
}

Box Around(Point a, Point b) {
  return {{std::min(a.x, b.x), std::min(a.y, b.y)}, {std::max(a.x, b.x), std::max(a.y, b.y)}};
}

}  // namespace geometry
