// SPDX-License-Identifier: Apache-2.0

// Straight lines between two points.
#ifndef EXAMPLES_GEOMETRY_SEGMENT_H_
#define EXAMPLES_GEOMETRY_SEGMENT_H_

#include "examples/geometry/point.h"

namespace geometry {

// A Segment has two ends.
struct Segment {
  Point a, b;
  bool Contains(Point p) const;
  bool Meets(const Segment& o) const;
};

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_SEGMENT_H_
