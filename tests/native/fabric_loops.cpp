// The package's own loops in the shape of fabric_bare.c: the same command line, the same processes, the same numbers.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "benchmark/native/loops.h"

using namespace tsn;
using namespace tsn::bench;

static std::string swap_addresses(int socket, const std::string& mine) {
  uint64_t size = mine.size();
  if (write(socket, &size, 8) != 8 || write(socket, mine.data(), size) != (ssize_t)size) exit(1);
  if (recv(socket, &size, 8, MSG_WAITALL) != 8) exit(1);
  std::string theirs(size, 0);
  if (recv(socket, &theirs[0], size, MSG_WAITALL) != (ssize_t)size) exit(1);
  return theirs;
}

int main(int argc, char** argv) {
  if (argc != 7) return fprintf(stderr, "usage: see the head of fabric_bare.c\n"), 2;
  const std::string mode = argv[1];
  const uint64_t bytes = strtoull(argv[3], nullptr, 10), iterations = strtoull(argv[4], nullptr, 10);
  const int window = atoi(argv[5]), repeat = atoi(argv[6]);
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) return 1;
  const int child = fork(), first = child != 0, socket = sockets[first];
  if (!first) prctl(PR_SET_PDEATHSIG, 9);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(first ? 0 : 1, &cpus);
  sched_setaffinity(0, sizeof cpus, &cpus);
  close(sockets[!first]);

  try {
    TransportOptions options;
    options.rank = !first;
    options.provider = argv[2];
    options.message_buffers = mode == "write" ? 16 : 0;
    options.delivery_complete = false;
    Session session(options, 2, 32 << 20, 20);
    session.connect(first, swap_addresses(socket, session.address()));
    for (int i = 0; i < repeat; i++) {
      double figure = 0;
      if (mode == "pingpong") {
        PingPongOptions o;
        o.bytes = bytes;
        o.iterations = iterations;
        o.starter = first;
        o.verify = false;
        const auto seconds = run_ping_pong(session, first, o);
        if (first) figure = std::accumulate(seconds.begin(), seconds.end(), 0.0) / iterations * 1e6;
      } else {
        BandwidthOptions o;
        o.operation = mode == "write" ? Transfer::write : Transfer::send;
        o.bytes = bytes;
        o.iterations = iterations;
        o.tx_depth = window;
        o.rx_depth = 128;
        o.initiator = first;
        o.stamps = false;
        const BandwidthResult result = run_bandwidth(session, first, o);
        if (first) figure = bytes * result.iterations / result.seconds / 1e6;
      }
      if (first) printf("%.4f\n", figure), fflush(stdout);
    }
  } catch (const std::exception& e) {
    return fprintf(stderr, "%s\n", e.what()), 1;
  }
  return first ? (waitpid(child, nullptr, 0), 0) : 0;
}
