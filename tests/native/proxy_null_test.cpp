// The proxy without a network: memory does not grow over many operations, and threads end however they are stopped.
//
// usage: proxy_null_test <millions of operations>
#include "tests/native/proxy_world.h"
#include "tilescale_net/csrc/testing/null_transport.h"

#include <fstream>
#include <string>

using namespace tsn;
using namespace tsn::proxy;

namespace {

// Resident set of this process in KiB.
long resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmRSS:", 0) == 0) return std::stol(line.substr(6));
  return -1;
}

void growth(int millions) {
  WorldOptions o;
  o.proxy.window = {64, 64};
  o.proxy.capacity = 256;
  o.make = testing::make_null;
  World w(o);
  Pe& pe = *w.pes[0];
  std::mt19937_64 random(1);
  auto operations = [&](int n) {
    for (int i = 0; i < n; i++) {
      char* a = pe.at(kSystemBytes + random() % (1 << 20) / 8 * 8);
      uint64_t* word = pe.at<uint64_t>(kSystemBytes + random() % 100000 * 8);
      switch (i % 8) {
      case 0:
        queue_put_signal(pe.context, a, a, 5000, 1, word, 1, SignalOp::add);
        break;
      case 1:
        queue_signal(pe.context, word, 1, 1, SignalOp::set);
        break;
      case 2:
        queue_put_value(pe.context, a, 1, 8, 1);
        break;
      case 3:
        queue_fence(pe.context, 1);
        break;
      case 4:
        queue_put(pe.context, a, a, 20, 1);
        break;
      default:
        queue_put(pe.context, a, a, 3000, 1);
      }
      if (i % 1000 == 999) pe.quiet(1);
    }
  };
  operations(200000);
  const long before = resident();
  operations(millions * 1000000);
  const long after = resident();
  std::printf("resident before %ld KiB, after %d million operations %ld KiB\n", before, millions, after);
  CHECK(after - before < 1024, "%ld KiB more", after - before);
  w.stop();
  w.check_healthy();
}

} // namespace

int main(int argc, char** argv) {
  growth(argc > 1 ? std::atoi(argv[1]) : 1);
  std::puts("ok");
  return 0;
}
