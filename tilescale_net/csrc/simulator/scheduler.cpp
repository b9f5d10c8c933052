// A grid in parts, for a scheduler that decides which thread goes on.
#include "scheduler.h"

#include "grid.h"

namespace tsn {
namespace sim {

Scheduler* scheduler = nullptr;

std::vector<std::vector<Fiber*>> Grid::threads_of_blocks() {
  std::vector<std::vector<Fiber*>> blocks;
  window_ = blocks_;
  while (started_ < blocks_) {
    start_block();
    blocks.push_back(std::move(ready_));
    ready_.clear();
  }
  return blocks;
}

void Grid::go_on(const std::vector<Fiber*>& fibers) {
  current_grid = this;
  ready_ = fibers;
  while (!ready_.empty() && failure_ == Failure::none) {
    for (position_ = 0; position_ < ready_.size() && failure_ == Failure::none; ++position_) resume(*ready_[position_]);
    if (fault_signal_) describe_fault();
    ready_ = std::move(next_);
    next_.clear();
  }
  current_grid = nullptr;
}

void Grid::pause() {
  running_->state = State::paused;
  leave();
}

} // namespace sim
} // namespace tsn
