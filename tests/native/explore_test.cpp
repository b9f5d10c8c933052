// Every schedule of a small job, without Python and without generated code; called by simulator_test.cpp.
#include "check.h"

#include "tilescale_net/csrc/explore/explorer.h"
#include "tilescale_net/device/types.h"

#include <string.h>

using namespace tsn::sim;
using tsn::explore::Explorer;
using tsn::explore::Limits;
using tsn::explore::Result;
using tsn::explore::Setup;

namespace {

Thread* self = nullptr;
// Of rank 0, of rank 1, and shared.
alignas(64) uint64_t memory[3][64];
const uint64_t numbers[2] = {0, 1};
bool fenced = false;

// Two changes of a word that do not commute.
void changes(const uint64_t* rank) {
  for (int i = 0; i < 2; ++i) {
    scheduler->visit(memory[2], 8, WordAccess::update);
    memory[2][0] = memory[2][0] * 3 + *rank + 1;
  }
}

void send(int word, int signal, int pe) {
  RemoteOperation o{};
  o.name = "put";
  o.pe = pe;
  o.value = 7;
  if (word >= 0) {
    o.destination = memory[0] + word;
    o.source = memory[0] + word;
    o.peer = memory[1] + word;
    o.bytes = 8;
  }
  if (signal >= 0) o.signal = memory[0] + signal, o.peer_signal = memory[1] + signal;
  CHECK(kRemoteApi.defer(o));
}

// Rank 0 puts a word and signals rank 1, which waits and copies it.
void message(const uint64_t* rank) {
  if (*rank == 0) {
    send(8, -1, 1);
    if (fenced) kRemoteApi.fence(1);
    send(-1, 0, 1);
    return;
  }
  WaitSubject subject{};
  subject.word = memory[1];
  subject.comparison = 1 + static_cast<uint32_t>(tsn::Compare::ge);
  subject.wanted = 7;
  scheduler->wait_begins(subject);
  for (;;) {
    scheduler->visit(memory[1], 8, WordAccess::read);
    if (memory[1][0] >= 7) break;
    current_grid->yield(true);
  }
  scheduler->wait_ends();
  scheduler->touch(memory[1] + 8, 8, false);
  memory[2][0] = memory[1][8];
}

Setup setup(void (*entry)(const uint64_t*)) {
  memset(memory, 0, sizeof memory);
  memory[0][8] = 5;
  Setup made;
  for (size_t r = 0; r < 2; ++r) {
    Launch l;
    l.entry = entry;
    l.arguments = numbers + r;
    l.self = &self;
    l.seed = 1;
    made.ranks.push_back({{l}, reinterpret_cast<uint64_t>(memory[r]), 0});
  }
  made.memory.push_back({reinterpret_cast<uint64_t>(memory), sizeof memory, {}});
  made.stack_bytes = 64 * 1024;
  return made;
}

} // namespace

void test_explore() {
  const auto never = [] { return false; };
  Explorer order(setup(changes), [] { return std::string(); }, never);
  const Result all = order.all({});
  CHECK(all.complete && all.failure.empty() && all.schedules == 6 && all.states > 1);
  CHECK(!order.all({2, 1e9, -1, true}).complete);
  CHECK(order.random(0, 10, 3).schedules == 10);
  const auto judge = [] { return memory[2][0] == 5 ? std::string() : "the data were late"; };
  for (bool right : {true, false}) {
    fenced = right;
    Explorer explorer(setup(message), judge, never);
    const Result found = explorer.all(Limits{});
    CHECK(right ? found.complete && found.failure.empty() : found.failure == "the data were late");
    if (right) continue;
    const Result again = explorer.repeat(found.schedule);
    CHECK(again.failure == found.failure && again.texts.size() == found.schedule.size());
    CHECK(explorer.random(0, 50, 3).failure == found.failure);
  }
}
