// SPDX-License-Identifier: Apache-2.0

// The last few of many.
#ifndef EXAMPLES_STORE_RING_H_
#define EXAMPLES_STORE_RING_H_

#include <cstddef>

namespace store {

template <typename T, size_t N>
class Ring {
 public:
  void Push(const T& item) { items_[pushed_++ % N] = item; }
  size_t Size() const { return pushed_ < N ? pushed_ : N; }
  // Returns the item pushed i pushes before the last one; i is below Size().
  const T& Back(size_t i) const { return items_[(pushed_ - 1 - i) % N]; }

 private:
  T items_[N] = {};
  size_t pushed_ = 0;
};

}  // namespace store

#endif  // EXAMPLES_STORE_RING_H_
