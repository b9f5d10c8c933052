#include "rules.h"

namespace tsn::sim {

const std::vector<Rule>& rules() {
  static const std::vector<Rule> table = {
      {false, "plain loads and stores",
       "of kernels to shared memory, to tensors of the rank and to the symmetric heap, by the byte; T.copy, T.gemm, "
       "reductions and scans among them, and CUDA's loads and stores with cache hints (__ldcg, __stcg)",
       "accesses of a function that is given a pointer, such as T.call_extern", "local_accesses.cpp", Gap::pointers},
      {false, "puts and gets",
       "every row and byte of source and target, in the heap, in other tensors and in shared memory; a put until a "
       "thread knows that it is done",
       "a source outside of the heap after its launch has ended; on one node which of several flushes to a PE a "
       "flush_wait ends: it counts as the latest (with VIRTUAL_NODES it is known)",
       "accesses.cpp, happens_before.cpp"},
      {false, "atomic accesses",
       "N.ld, N.st, N.atomic_* and T.atomic_*, compared with plain accesses, puts and gets of any rank, and with each "
       "other between ranks where the scope of one does not hold the other",
       "two atomic accesses of one rank of which one has the scope of its block", "accesses.cpp"},
      {false, "order by words",
       "release, acquire, fences and scopes as in PTX; a word of another rank's heap gives what was left in that word",
       "which of several releases an acquire has read: it counts as having read all that came by then, so that a loop "
       "of N.ld that ends too early shows under some seeds only (a wait for a signal in any)",
       "happens_before.cpp"},
      {false, "signals", "what a wait or test shows by its value, for certain, whichever signals came first",
       "smaller values than the one that a kernel gets and looks at, which other schedules show (a check tries them); "
       "words with more than 1,024 signals in a launch: a wait has then seen all that came; with more than 256, that "
       "warps of one rank may add in another order; an order between the adds of different ranks to one word: a wait "
       "for "
       "the first of them may be reported (use a word for each rank)",
       "race_memory.cpp"},
      {false, "barriers and warp operations", "of blocks, of named barriers, of the grid, mbarriers, T.sync_warp",
       "a put_signal of a block or warp: its threads may meet at its end, which no GPU promises", "happens_before.cpp"},
      {false, "remote views", "stores as puts, loads as gets, atomic accesses as such", "", "accesses.cpp"},
      {false, "the host",
       "torch's operators, torch.distributed, numpy(), DLPack, tolist() and tsn.free on symmetric tensors; "
       "writes between launches through an array that numpy() or DLPack has given, by the bytes that change",
       "reads through such an array, writes through it while a kernel runs or to bytes that another rank has put and "
       "nothing sends on, arrays beyond 256 MiB, pointers, threads older than tsn.init, code of torch.compile",
       "accesses.cpp"},
      {false, "the async proxy", "missing fences and waits for TMA when the kernel is compiled",
       "TMA and wgmma in flight: they are done when the call returns", "compiler/passes/hazards.py"},
      {false, "streams", "launches of a rank, one after the other", "kernels that a GPU runs beside each other",
       "race_memory.cpp"},
      {false, "history",
       "of every 4 bytes (or byte) the last store and the last loads of two warps; the last 65,536 transfers of a rank",
       "accesses that later ones have overwritten there", "race_memory.h"},
      {false, "ranks", "up to 64 on one host, with heaps up to 64 GiB", "more: each rank is compared by itself",
       "race_memory.cpp"},
      {false, "warps of a launch", "up to 65,535",
       "a launch of 65,536 warps or more: only puts and fences are compared", "grid.cpp", Gap::warps},
      {false, "memory of a launch", "64 MiB that its threads touch",
       "accesses beyond the first 64 MiB that a launch touches, among threads of one rank", "local_accesses.cpp",
       Gap::pages},
      {false, "puts without a fence", "4,096 of a warp to a PE",
       "further puts of a warp to a PE without a fence or quiet between: whether a fence follows them",
       "happens_before.cpp", Gap::puts},
      {false, "waits with \"eq\"", "4,096 of a launch", "further waits for a value exactly: whether the word goes on",
       "happens_before.cpp", Gap::exact_waits},
      {true, "schedules", "every order of accesses to words, of arrivals and of blocks, of kernels on one node",
       "other nodes and the proxy: copies to staging memory, their quiet, forwarders", "explore/job.cpp"},
      {true, "loops that poll", "N.test and N.ld with any order: a poll in vain only when no other thread can go on",
       "a loop that ends after a number of polls without a change", "explore/job.cpp", Gap::polls},
      {true, "order of a thread",
       "words accessed at once (N.ld, N.st, N.atomic_* with a result, T.atomic_*) in the order of the program",
       "a thread's accesses to two words that a GPU may carry out in the other order: two loads or a store after "
       "either, without a fence between them, an acquire by the first or a release by the second",
       "explore/job.cpp", Gap::reordered},
      {true, "loads behind stores",
       "in the order of the program; a loop that polls, or what threads have learnt from each other, makes up for "
       "another one",
       "a load that a GPU may carry out before the thread's own earlier store to a word that another thread loads "
       "after a store to this one (locks by flags, such as Dekker's): whatever their orders, also behind N.fence, "
       "unless __threadfence_system() or a T.atomic_load with \"seq_cst\" keeps it back",
       "explore/job.cpp", Gap::late_stores},
      {true, "shared memory", "with the race detector: a race there ends the check", "with --no-races: shared memory",
       "explore/job.cpp", Gap::shared},
      {true, "sources of puts", "with the race detector: a write there while it is read ends the check",
       "with --no-races: writes to the source of a put in flight", "explore/job.cpp", Gap::sources},
      {true, "length", "100,000 decisions of a schedule", "what comes after 100,000 decisions of a schedule",
       "explore/explorer.cpp", Gap::decisions},
      {true, "data of a put", "arrive together; the race detector reports what reads them too early",
       "pieces of one put, bulk copies of large puts (done at once)", "explore/job.cpp"},
      {true, "the host", "what the check of the job finds at the end", "what the host does between launches",
       "explore/case.py"},
      {true, "blocks", "all of a launch at a time", "launches whose blocks are not all resident (refused)",
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
