// The transport and the chaos around it against the strict device of fabric_fake.cpp, for runs under sanitizers:
//   fabric_test LIBFABRIC SEEDS
// FAKE_FABRIC configures the device. Everything sent must arrive once and intact, with any seed.
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "check.h"
#include "tilescale_net/csrc/fabric/transport.h"
#include "tilescale_net/csrc/testing/chaos.h"

using namespace tsn;
using namespace tsn::fabric;

namespace {

struct End {
  std::unique_ptr<Transport> transport;
  std::vector<char> memory = std::vector<char>(1 << 16);
  Region region;
  RemoteRegion remote;
  std::map<uint64_t, int> done, failed;
  std::multiset<uint32_t> immediates;
  std::multiset<std::string> messages;

  End(const char* library, int rank, const std::string& chaos, int rails) {
    TransportOptions options;
    options.rank = rank;
    options.library = library;
    options.rails = rails;
    options.depth = 32;
    options.message_buffers = 24;
    options.chaos = chaos;
    transport = make_transport(options);
    region = transport->register_memory({memory.data(), memory.size(), Memory::host, 0});
  }
  void poll() {
    Event events[7];
    for (int n = transport->poll(events, 7), i = 0; i < n; i++) {
      const Event& e = events[i];
      if (e.kind == Event::done) CHECK(++done[e.cookie] == 1);
      if (e.kind == Event::failed) CHECK(++failed[e.cookie] == 1 && strlen(e.text) > 10);
      if (e.kind == Event::immediate) immediates.insert(e.imm);
      if (e.kind == Event::message) messages.emplace(static_cast<const char*>(e.data), e.bytes);
    }
  }
};

void meet(End& a, int rank, End& b) {
  a.transport->connect(1 - rank, b.transport->address());
  a.remote = a.transport->add_remote(1 - rank, b.transport->region_key(b.region));
}

void run(const char* library, int seed) {
  std::mt19937 random(seed);
  const std::string texts[] = {"off", "seed=" + std::to_string(seed) + ",reorder=0.5,split=0.5,eagain=0.3,depth=20",
                               "seed=" + std::to_string(seed) + ",reorder=0.2,error=0.1"};
  const std::string& chaos = texts[seed % 3];
  End a(library, 0, chaos, 1 + seed % 3), b(library, 1, chaos, 1 + seed % 2);
  meet(a, 0, b);
  meet(b, 1, a);
  for (char& c : a.memory) c = static_cast<char>(random());
  const int rails = a.transport->properties().rails;
  constexpr int kCopies = 120, kMessages = 80;
  std::multiset<std::string> sent;
  for (int i = 0; i < kCopies; i++) {
    Transport::Copy copy = {};
    copy.rail = i % rails;
    copy.peer = 1;
    copy.local = a.region;
    copy.remote = b.region;
    copy.local_offset = copy.remote_offset = i * 500;
    copy.bytes = 1 + random() % 500;
    copy.cookie = i;
    copy.has_imm = true;
    copy.imm = i;
    copy.more = i % 2 && i + rails < kCopies;
    Post post;
    while ((post = a.transport->post_write(copy)) == Post::again) a.poll(), b.poll();
    CHECK(post == Post::ok, "%s", a.transport->last_error());
    if (i < kMessages) {
      const std::string text(1 + random() % 200, static_cast<char>('a' + i % 26));
      while ((post = a.transport->post_message(copy.rail, 1, text.data(), text.size(), 1000 + i)) == Post::again)
        a.poll(), b.poll();
      CHECK(post == Post::ok, "%s", a.transport->last_error());
      sent.insert(text);
    }
  }
  for (long turns = 0; a.done.size() + a.failed.size() < kCopies + kMessages; turns++) {
    a.poll(), b.poll();
    CHECK(turns < 50000000, "%zu done, %zu failed", a.done.size(), a.failed.size());
  }
  const bool faulty = chaos.find("error") != std::string::npos;
  for (long turns = 0; b.immediates.size() + b.messages.size() + a.failed.size() < kCopies + kMessages; turns++) {
    a.poll(), b.poll();
    CHECK(turns < 50000000);
  }
  CHECK(faulty ? a.failed.size() > 0 : a.failed.empty());
  for (int i = 0; i < kCopies; i++) CHECK(b.immediates.count(i) == (a.failed.count(i) ? 0u : 1u), "immediate %d", i);
  if (!faulty) CHECK(b.messages == sent);
  // An early end: outstanding operations are forgotten, nothing is touched afterwards.
  Transport::Copy last = {0, 1, a.region, 0, 0, 0, 400, 7, true, false, 1};
  for (int i = 0; i < 10; i++) (void)a.transport->post_write(last);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  for (int seed = 0; seed < atoi(argv[2]); seed++) run(argv[1], seed);
  puts("good");
}
