#include "rules.h"

namespace tsn::sim {

const std::vector<Rule>& rules() {
  static const std::vector<Rule> table = {
      {false, "plain loads and stores",
       "of kernels to shared memory, to tensors of the rank and to the symmetric heap, by the byte; T.copy, T.gemm, "
       "reductions and scans among them, and CUDA's loads and stores with cache hints (__ldcg, __stcg)",
       "accesses of a function that takes a pointer, such as T.call_extern", "local_accesses.cpp", Gap::pointers},
      {false, "puts and gets",
       "every row and byte of source and target, in the heap, in other tensors and in shared memory; a put until a "
       "thread knows that it is complete",
       "a source outside of the heap after its launch has ended; on one node the flush of a flush_wait among several "
       "to a PE: the latest counts (with VIRTUAL_NODES it is known)",
       "accesses.cpp, happens_before.cpp"},
      {false, "atomic accesses",
       "N.ld, N.st, N.atomic_* and T.atomic_*, compared with plain accesses, puts and gets of any rank, and with each "
       "other between ranks if the scope of one does not include the other",
       "two atomic accesses of one rank, one of them with block scope", "accesses.cpp"},
      {false, "order by words",
       "release, acquire, fences and scopes as in PTX; a word of another rank's heap propagates what was released "
       "there; the certain result of a loop of N.ld or T.atomic_load with an empty body, by all values that end it, if "
       "threads only add to the word or one rank sets it",
       "the release that any other acquire has read, among several: all earlier ones count as read, so a loop that "
       "ends too early shows under some seeds only; such are loops with a body, and loops that compare with an element "
       "of a tensor",
       "happens_before.cpp"},
      {false, "signals", "the certain result of a wait or test by its value, whichever signals came first",
       "smaller values than the one that a kernel reads, which other schedules show (a check tries them); words with "
       "more than 1,024 signals in a launch: a wait has then seen all that came; with more than 256, other orders of "
       "adds by warps of one rank; an order between adds of different ranks to one word: a wait for the first of them "
       "may be reported (use a word for each rank)",
       "race_memory.cpp"},
      {false, "barriers and warp operations", "of blocks, of named barriers, of the grid, mbarriers, T.sync_warp",
       "a put_signal of a block or warp: its threads may meet at its end, which no GPU promises", "happens_before.cpp"},
      {false, "remote views", "stores as puts, loads as gets, atomic accesses as such", "", "accesses.cpp"},
      {false, "the host",
       "torch's operators, torch.distributed, numpy(), DLPack, tolist() and tsn.free on symmetric tensors; writes "
       "between launches through an array of numpy() or DLPack, by the changed bytes",
       "reads through such an array, writes through it while a kernel runs or to bytes from another rank's put that no "
       "put sends on, arrays beyond 256 MiB, pointers, threads older than tsn.init, code of torch.compile",
       "accesses.cpp"},
      {false, "the async proxy", "missing fences and waits for TMA when the kernel is compiled",
       "TMA and wgmma in flight: they complete before the call returns", "compiler/passes/hazards.py"},
      {false, "streams", "launches of a rank, one after the other", "concurrent kernels of a GPU", "race_memory.cpp"},
      {false, "history",
       "of every 4 bytes (or byte) the last store and the last loads of two warps; the last 65,536 transfers of a rank",
       "older accesses", "race_memory.h"},
      {false, "ranks", "up to 64 on one host, with heaps up to 64 GiB", "more: each rank is compared by itself",
       "race_memory.cpp"},
      {false, "warps of a launch", "up to 65,535",
       "a launch of 65,536 warps or more: only puts and fences are compared", "grid.cpp", Gap::warps},
      {false, "memory of a launch", "64 MiB of accessed memory",
       "accesses beyond the first 64 MiB of a launch, among threads of one rank", "local_accesses.cpp", Gap::pages},
      {false, "puts without a fence", "4,096 of a warp to a PE",
       "further puts of a warp to a PE without a fence or quiet between: whether a fence follows them",
       "happens_before.cpp", Gap::puts},
      {false, "waits with \"eq\"", "4,096 of a launch",
       "further waits for an exact value: whether the word changes further", "happens_before.cpp", Gap::exact_waits},
      {true, "schedules", "every order of accesses to words, of arrivals and of blocks, of kernels on one node",
       "other nodes and the proxy: copies to staging memory, their quiet, forwarders", "explore/job.h"},
      {true, "loops that poll", "N.test and N.ld with any order: a poll in vain only if no other thread can run",
       "a loop that ends after a number of polls without a change", "explore/job.h", Gap::polls},
      {true, "order of a thread",
       "words accessed at once (N.ld, N.st, N.atomic_* with a result, T.atomic_*) in program order",
       "a thread's accesses to two words that a GPU may reorder: two loads or a store after either, without a fence "
       "between them, an acquire by the first or a release by the second",
       "explore/job.h", Gap::reordered},
      {true, "loads behind stores",
       "in program order; a polling loop, or synchronisation between the threads, covers the other order",
       "a load that a GPU may execute before the thread's own earlier store to a word that another thread loads after "
       "a store to this one (locks by flags, such as Dekker's): with any orders, also behind N.fence, except behind "
       "__threadfence_system() or for a T.atomic_load with \"seq_cst\"",
       "explore/job.h", Gap::late_stores},
      {true, "shared memory", "with the race detector: a race there ends the check", "with --no-races: shared memory",
       "explore/job.h", Gap::shared},
      {true, "sources of puts", "with the race detector: a write there while it is read ends the check",
       "with --no-races: writes to the source of a put in flight", "explore/job.h", Gap::sources},
      {true, "length", "100,000 decisions of a schedule", "events after 100,000 decisions of a schedule",
       "explore/explorer.h", Gap::decisions},
      {true, "data of a put", "arrive together; the race detector reports early reads",
       "pieces of one put, bulk copies of large puts (done at once)", "explore/job.h"},
      {true, "the host", "the job's check at the end", "the host between launches", "explore/case.py"},
      {true, "blocks", "all of a launch at a time", "launches whose blocks are not all resident (rejected)",
       "explore/case.py"},
  };
  return table;
}

std::string gap_text(Gap gap, const std::string& line) {
  constexpr char with_option[] = "with --no-races: ";
  for (const Rule& rule : rules()) {
    if (rule.gap != gap) continue;
    std::string text = rule.not_followed;
    if (text.rfind(with_option, 0) == 0) text.erase(0, sizeof(with_option) - 1);
    return text + line;
  }
  return "";
}

} // namespace tsn::sim
