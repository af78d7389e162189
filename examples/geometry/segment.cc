// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/segment.h"

#include "examples/geometry/box.h"

namespace geometry {
namespace {

int Side(const Segment& s, Point p) {
  const int64_t turn = Turn(s.a, s.b, p);
  return (turn > 0) - (turn < 0);
}

}  // namespace

bool Segment::Contains(Point p) const { return Side(*this, p) == 0 && Around(a, b).Contains(p); }

bool Segment::Meets(const Segment& o) const {
  return Around(a, b).Meets(Around(o.a, o.b)) && Side(*this, o.a) * Side(*this, o.b) <= 0 &&
         Side(o, a) * Side(o, b) <= 0;
}

}  // namespace geometry
