// Calls through TSN_TRACED as a plain program: two PEs of one process. Writes the ring of the first to a file.
#define TSN_HOST_STANDALONE
#define TSN_TRACE_KERNEL 7
#define TSN_SHORT_WAIT_NS 0
#include "traced_calls.h"
#include "tilescale_net.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace tsn;

int main(int argc, char** argv) {
  const uint64_t capacity = strtoull(argv[1], nullptr, 10);
  const int rounds = atoi(argv[2]);
  std::vector<uint64_t> heaps[2], contexts[2];
  uint32_t abort_word = 0;
  ErrorRecord error = {};
  const size_t bytes = sizeof(TraceBuffer) + (capacity + 2 * kTracedBlocks * kTracedWarps) * sizeof(TracedCall);
  TraceBuffer* buffer = static_cast<TraceBuffer*>(aligned_alloc(sizeof(TraceBuffer), bytes));
  memset(buffer, 0, bytes);
  buffer->capacity = capacity;
  for (int i = 0; i < 2; i++) {
    heaps[i].resize(kSystemBytes / 8 + 64);
    contexts[i].resize(offsetof(Context, peer_base) / 8 + kInlineBases);
  }
  for (int i = 0; i < 2; i++) {
    Context& c = *reinterpret_cast<Context*>(contexts[i].data());
    c.version = kContextVersion;
    c.my_pe = c.node_pe = i;
    c.n_pes = c.n_node_pes = 2;
    c.heap_base = reinterpret_cast<uint64_t>(heaps[i].data());
    c.heap_bytes = heaps[i].size() * 8;
    c.abort_word = reinterpret_cast<uint64_t>(&abort_word);
    c.error = reinterpret_cast<uint64_t>(&error);
    c.timeout_ns = 20000000; // of the wait in vain at the end
    if (i == 0) c.trace = reinterpret_cast<uint64_t>(buffer) | uint64_t(__builtin_ctzll(capacity));
    for (int k = 0; k < 2; k++) c.peer_base[k] = reinterpret_cast<uint64_t>(heaps[k].data());
  }
  const auto* ctx = reinterpret_cast<const Context*>(contexts[0].data());
  const auto* other = reinterpret_cast<const Context*>(contexts[1].data());
  uint64_t* words = heaps[0].data() + kSystemBytes / 8;
  {
    TSN_TRACED_KERNEL(6)(ctx);
    for (int i = 1; i <= rounds; i++) {
      TSN_TRACED(0, Scope::thread, false, 3, 4, 5, 2, -1,
                 put_signal<Scope::thread, Engine::automatic, 1, 0, 0, SignalOp::set>)
      (ctx, words + 8, words, 64, 1, words + 1, uint64_t(i), nullptr);
      signal<Scope::thread, SignalOp::add, 0>(other, heaps[1].data() + kSystemBytes / 8 + 2, uint64_t(2), 0);
      const uint64_t seen = TSN_TRACED(1, Scope::thread, true, -1, 0, 1, -1, -1,
                                       wait<Scope::thread, Compare::ge>)(ctx, words + 2, int64_t(i));
      if (seen != uint64_t(2 * i)) return 1;
      if (i == 2) TSN_TRACED(4, Scope::thread, false, -1, -1, -1, -1, -1, range_begin)(ctx);
      // Without a ring nothing is noted.
      {
        TSN_TRACED_KERNEL(6)(other);
        TSN_TRACED(2, Scope::thread, true, 0, -1, -1, -1, -1, quiet<Scope::thread>)(other, -1);
      }
      TSN_TRACED(3, Scope::thread, false, 6, -1, -1, 3, 2, put_rows<Scope::thread, 1>)
      (ctx, words + 8, words, int64_t(3), int64_t(16), int64_t(32), int64_t(32), 1);
    }
    TSN_TRACED(5, Scope::thread, false, -1, -1, -1, -1, -1, range_end)(ctx);
    TSN_TRACED(5, Scope::thread, false, -1, -1, -1, -1, -1, range_end)(ctx); // of a range that is gone
    TSN_TRACED(1, Scope::thread, true, -1, 0, 1, -1, -1, wait<Scope::thread, Compare::ge>)(ctx, words + 3, int64_t(5));
    TSN_TRACED(2, Scope::thread, true, 0, -1, -1, -1, -1, quiet<Scope::thread>)(ctx, -1);
  }
  FILE* file = fopen(argv[3], "wb");
  fwrite(buffer, 1, bytes, file);
  free(buffer);
  return fclose(file) || argc != 4;
}
