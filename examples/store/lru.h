// SPDX-License-Identifier: Apache-2.0

// A cache that evicts the least recently used entry.
#ifndef EXAMPLES_STORE_LRU_H_
#define EXAMPLES_STORE_LRU_H_

#include <cstddef>
#include <list>
#include <map>
#include <utility>

namespace store {

template <typename K, typename V>
class Lru {
 public:
  explicit Lru(size_t capacity) : capacity_(capacity) {}

  // Returns the value of key, or nullptr; it is valid until the next call.
  V* Get(const K& key) {
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->second;
  }

  void Put(const K& key, V value) {
    if (V* present = Get(key)) {
      *present = std::move(value);
      return;
    }
    entries_.emplace_front(key, std::move(value));
    index_[key] = entries_.begin();
    if (entries_.size() > capacity_) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
  }

 private:
  size_t capacity_;
  std::list<std::pair<K, V>> entries_;  // used last first
  std::map<K, typename std::list<std::pair<K, V>>::iterator> index_;
};

}  // namespace store

#endif  // EXAMPLES_STORE_LRU_H_
