// Calls of grids to a scheduler, which decides the next thread if all ranks of a job run in this process; see
// csrc/explore.
#pragma once

#include "race_memory.h"
#include "tilescale_net/device/host/simulator_api.h"

namespace tsn::sim {

struct Fiber;
struct Late;

// A process's knowledge of a job's events: the latest earlier one of each process, -1 for none.
using Past = std::shared_ptr<const std::vector<int32_t>>;

// The running thread calls all of these, unless noted otherwise.
class Scheduler {
public:
  virtual ~Scheduler() = default;
  // It is about to read or change a synchronisation word; returns when it may.
  virtual void visit(const void* address, uint64_t bytes, WordAccess access) = 0;
  // It has polled without success.
  virtual void polls() = 0;
  virtual void wait_begins(const WaitSubject& subject) = 0;
  virtual void wait_ends() = 0;
  virtual void gives_up() = 0;
  // These threads have met, and the running one.
  virtual void meet(const std::vector<Fiber*>& fibers) = 0;
  virtual void begin(const Call& call) = 0;
  // A plain access.
  virtual void touch(const void* address, uint64_t bytes, bool store) = 0;
  // It is about to send; returns when it may. Then the sent operation.
  virtual void before_sending(const RemoteOperation& operation) = 0;
  virtual void send(Late&& late) = 0;
  // It is about to access a word at once; returns when earlier operations have arrived.
  virtual void reach(const void* word, bool changes) = 0;
  virtual void fence(int pe) = 0;
  virtual void quiet(int pe) = 0;
  // It has accessed a word with this order, or is about to; a fence of its own for words.
  virtual void ordered(const void* word, WordAccess access, Ordering ordering) = 0;
  virtual void fenced(uint32_t scope, bool total) = 0;
};

// Null: ranks are processes, and each grid schedules itself.
extern Scheduler* scheduler;

} // namespace tsn::sim
