// SPDX-License-Identifier: Apache-2.0

// A priority queue, smallest first.
#ifndef EXAMPLES_STORE_HEAP_H_
#define EXAMPLES_STORE_HEAP_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace store {

template <typename T>
class Heap {
 public:
  bool Empty() const { return items_.empty(); }

  void Push(T item) {
    items_.push_back(std::move(item));
    for (size_t i = items_.size() - 1; i > 0 && items_[i] < items_[(i - 1) / 2]; i = (i - 1) / 2)
      std::swap(items_[i], items_[(i - 1) / 2]);
  }

  // The heap must not be empty.
  T Pop() {
    T least = std::move(items_.front());
    items_.front() = std::move(items_.back());
    items_.pop_back();
    for (size_t i = 0, child; (child = 2 * i + 1) < items_.size(); i = child) {
      if (child + 1 < items_.size() && items_[child + 1] < items_[child]) child++;
      if (!(items_[child] < items_[i])) break;
      std::swap(items_[i], items_[child]);
    }
    return least;
  }

 private:
  std::vector<T> items_;
};

}  // namespace store

#endif  // EXAMPLES_STORE_HEAP_H_
