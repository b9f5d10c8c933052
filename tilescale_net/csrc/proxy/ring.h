// A queue over a power-of-two array that grows when it must and never shrinks: no allocation in steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tsn::proxy {

template <class T>
class Ring {
public:
  bool empty() const { return head_ == tail_; }
  size_t size() const { return tail_ - head_; }
  T& front() { return slots_[head_ & (slots_.size() - 1)]; }
  T& back() { return slots_[(tail_ - 1) & (slots_.size() - 1)]; }
  // The i-th element from the front.
  T& operator[](size_t i) { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  void pop() { head_++; }
  void push(T value) { add() = std::move(value); }
  // A new last element, to be filled in place; it holds what was there before.
  T& add() {
    if (size() == slots_.size()) grow();
    return slots_[tail_++ & (slots_.size() - 1)];
  }

private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);
    const size_t n = size();
    for (size_t i = 0; i < n; i++) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    head_ = 0;
    tail_ = n;
  }

  std::vector<T> slots_;
  size_t head_ = 0, tail_ = 0;
};

} // namespace tsn::proxy
