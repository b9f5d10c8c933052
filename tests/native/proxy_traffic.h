// Kernels for tests of the proxy. Each checks every byte and every signal that it gets.
//
// The heap of a PE: the system area, then for every (block, source) a signal page and a landing area, then the area
// that puts come from.
#pragma once

#include "tests/native/proxy_world.h"

namespace tsn::proxy {

struct Traffic {
  int pes, blocks;
  uint64_t seed;
  int rounds = 40;
  uint64_t largest = 20000; // bytes of one put

  static constexpr int kSlots = 4; // landing areas per source, used in turn
  uint64_t area() const { return (largest + 64 + 63) & ~63ull; }
  uint64_t lane_bytes() const { return 4096 + area() * kSlots * 2; }
  // Where block `b` of PE `from` writes on any PE, and where it prepares data for PE `from`.
  uint64_t lane(int b, int from) const {
    return kSystemBytes + ((uint64_t)b * (uint64_t)pes + (uint64_t)from) * lane_bytes();
  }
  uint64_t landing(int b, int from, int i) const { return lane(b, from) + 4096 + (uint64_t)(i % kSlots) * area(); }
  uint64_t source(int b, int to, int i) const {
    return lane(b, to) + 4096 + area() * kSlots + (uint64_t)(i % kSlots) * area();
  }
  uint64_t heap_bytes() const { return (kSystemBytes + lane_bytes() * (uint64_t)(blocks * pes) + 4095) & ~4095ull; }
  // What sender and receiver both know of message i: size, misalignment, contents.
  std::mt19937_64 random(int b, int from, int to, int i) const {
    return std::mt19937_64(seed * 1000003 + ((uint64_t)b * 64 + (uint64_t)from) * 64 * 100000 + (uint64_t)to * 100000 +
                           (uint64_t)i);
  }
};

inline uint8_t pattern(uint64_t key, uint64_t i) { return (uint8_t)((key + i * 0x9e3779b97f4a7c15ull) >> 56); }
inline void write_pattern(char* p, uint64_t n, uint64_t key) {
  for (uint64_t i = 0; i < n; i++) p[i] = (char)pattern(key, i);
}
inline void check_pattern(const char* p, uint64_t n, uint64_t key, const char* what, int me, int from, int round) {
  for (uint64_t i = 0; i < n; i++)
    CHECK((uint8_t)p[i] == pattern(key, i), "%s: PE %d, from PE %d, round %d: byte %d of %d is wrong", what, me, from,
          round, (int)i, (int)n);
}
inline uint64_t pick_size(std::mt19937_64& r, uint64_t largest) {
  switch (r() % 4) {
  case 0:
    return 1 + r() % 16;
  case 1:
    return 1 + r() % std::min<uint64_t>(largest, 300);
  default:
    return 1 + r() % largest;
  }
}

// put_signal in a window of kSlots: data are there with their own signal, and the signals of a word come in order;
// every other block's are added.
inline void traffic_put_signal(World& w, const Traffic& t) {
  w.run(
      [&](Pe& pe, int b) {
        const int me = pe.rank;
        const bool adds = b % 2 != 0; // to the same numbers
        for (int i = 0; i < t.rounds; i++) {
          for (int d = 1; d < t.pes; d++) {
            const int to = (me + d) % t.pes;
            auto r = t.random(b, me, to, i);
            const uint64_t n = pick_size(r, t.largest), shift = r() % 33, key = r();
            if (i >= Traffic::kSlots) {
              // The receiver has read message i - kSlots, so that our source and its landing area are free.
              pe.wait(t.lane(b, to) + 64, (uint64_t)(i - Traffic::kSlots + 1));
            }
            char* src = pe.at(t.source(b, to, i) + shift % 7);
            write_pattern(src, n, key);
            queue_put_signal(pe.context, pe.at(t.landing(b, me, i) + shift), src, (int64_t)n, to,
                             pe.at<uint64_t>(t.lane(b, me)), adds ? 1 : (uint64_t)i + 1,
                             adds ? SignalOp::add : SignalOp::set);
          }
          for (int d = 1; d < t.pes; d++) {
            const int from = (me + t.pes - d) % t.pes;
            auto r = t.random(b, from, me, i);
            const uint64_t n = pick_size(r, t.largest), shift = r() % 33, key = r();
            pe.wait(t.lane(b, from), (uint64_t)i + 1);
            check_pattern(pe.at(t.landing(b, from, i) + shift), n, key, "put_signal", me, from, i);
            // Signals the sender, in the word that its block waits for: lane (b, me) + 64 at PE `from`.
            queue_signal(pe.context, pe.at<uint64_t>(t.lane(b, me) + 64), (uint64_t)i + 1, from, SignalOp::set);
          }
        }
        pe.quiet(-1);
      },
      t.blocks);
}

// Several puts of all kinds, a fence, one signal: everything before the fence is there when the signal is.
inline void traffic_fence(World& w, const Traffic& t) {
  w.run(
      [&](Pe& pe, int b) {
        const int me = pe.rank;
        for (int i = 0; i < t.rounds; i++) {
          for (int d = 1; d < t.pes; d++) {
            const int to = (me + d) % t.pes;
            if (i > 0) pe.wait(t.lane(b, to) + 64, (uint64_t)i);
            auto r = t.random(b, me, to, i);
            for (int k = 0; k < Traffic::kSlots; k++) {
              const uint64_t n = pick_size(r, t.largest), key = r();
              char* src = pe.at(t.source(b, to, k));
              write_pattern(src, n, key);
              char* dst = pe.at(t.landing(b, me, k));
              if (k == 2)
                queue_put_signal(pe.context, dst, src, (int64_t)n, to, pe.at<uint64_t>(t.lane(b, me) + 128),
                                 (uint64_t)i + 1, SignalOp::set);
              else queue_put(pe.context, dst, src, (int64_t)n, to);
            }
            for (int k = 0; k < 4; k++)
              queue_put_value(pe.context, pe.at(t.lane(b, me) + 256 + 8 * (uint64_t)k), r(), 1 << k, to);
            queue_fence(pe.context, i % 2 ? to : -1);
            queue_signal(pe.context, pe.at<uint64_t>(t.lane(b, me)), (uint64_t)i + 1, to, SignalOp::set);
          }
          for (int d = 1; d < t.pes; d++) {
            const int from = (me + t.pes - d) % t.pes;
            pe.wait(t.lane(b, from), (uint64_t)i + 1);
            auto r = t.random(b, from, me, i);
            for (int k = 0; k < Traffic::kSlots; k++) {
              const uint64_t n = pick_size(r, t.largest), key = r();
              check_pattern(pe.at(t.landing(b, from, k)), n, key, "fence", me, from, i);
            }
            for (int k = 0; k < 4; k++) {
              const uint64_t value = r();
              CHECK(std::memcmp(pe.at(t.lane(b, from) + 256 + 8 * (uint64_t)k), &value, 1u << k) == 0,
                    "value of %d bytes, PE %d, from PE %d, round %d", 1 << k, me, from, i);
            }
            pe.wait(t.lane(b, from) + 128, (uint64_t)i + 1);
            queue_signal(pe.context, pe.at<uint64_t>(t.lane(b, me) + 64), (uint64_t)i + 1, from, SignalOp::set);
          }
        }
        pe.quiet(-1);
      },
      t.blocks);
}

// Gets of random places of all peers, several at a time.
inline void traffic_get(World& w, const Traffic& t) {
  for (auto& pe : w.pes)
    for (int b = 0; b < t.blocks; b++)
      for (int i = 0; i < Traffic::kSlots; i++)
        write_pattern(pe->at(t.source(b, pe->rank, i)), t.largest, (uint64_t)(pe->rank * 100 + b * 10 + i));
  w.barrier();
  w.run(
      [&](Pe& pe, int b) {
        for (int i = 0; i < t.rounds; i++) {
          auto r = t.random(b, pe.rank, 0, i);
          struct Asked {
            uint64_t ticket, n;
            int from, slot;
          };
          std::vector<Asked> asked;
          for (int k = 0; k < Traffic::kSlots; k++) {
            const int from = (pe.rank + 1 + (int)(r() % (uint64_t)(t.pes - 1))) % t.pes,
                      slot = (int)(r() % Traffic::kSlots);
            const uint64_t n = pick_size(r, t.largest);
            const uint64_t ticket = queue_get(pe.context, pe.at(t.landing(b, pe.rank, k)),
                                              pe.at(t.source(b, from, slot)), (int64_t)n, from);
            asked.push_back({ticket, n, from, slot});
          }
          for (int k = Traffic::kSlots - 1; k >= 0; k--) {
            const Asked& a = asked[(size_t)k];
            CHECK(queue_wait(pe.context, a.ticket, kOpGet, a.from), "PE %d: a get did not end", pe.rank);
            check_pattern(pe.at(t.landing(b, pe.rank, k)), a.n, (uint64_t)(a.from * 100 + b * 10 + a.slot), "get",
                          pe.rank, a.from, i);
          }
        }
      },
      t.blocks);
}

// Adds from everyone to one word; nothing is lost.
inline void traffic_add(World& w, const Traffic& t) {
  const uint64_t word = t.lane(0, 0) + 512;
  const int adds = t.rounds * 10;
  w.run(
      [&](Pe& pe, int b) {
        for (int i = 0; i < adds; i++)
          for (int d = 1; d < t.pes; d++) {
            const int to = (pe.rank + d) % t.pes;
            if (i % 3) queue_signal(pe.context, pe.at<uint64_t>(word), 1 + (uint64_t)i, to, SignalOp::add);
            else
              queue_put_signal(pe.context, pe.at(t.landing(b, pe.rank, i)), pe.at(t.source(b, to, i)), i % 500, to,
                               pe.at<uint64_t>(word), 1 + (uint64_t)i, SignalOp::add);
            // The GPUs of the target's node add with atomics of their own.
            if (i % 5) continue;
            if (Pe* target = w.local(to)) __atomic_fetch_add(target->at<uint64_t>(word), 1, __ATOMIC_RELAXED);
            else queue_signal(pe.context, pe.at<uint64_t>(word), 1, to, SignalOp::add);
          }
        if (b == 0) {
          const uint64_t one = (uint64_t)adds * (uint64_t)(adds + 1) / 2 + (uint64_t)(adds + 4) / 5;
          const uint64_t all = one * (uint64_t)(t.pes - 1) * (uint64_t)t.blocks;
          pe.wait(word, all);
          pe.quiet(-1);
          CHECK(__atomic_load_n(pe.at<uint64_t>(word), __ATOMIC_ACQUIRE) == all, "PE %d counted too much", pe.rank);
        }
      },
      t.blocks);
}

// After quiet the data are at the target, without any signal.
inline void traffic_quiet(World& w, const Traffic& t) {
  for (int i = 0; i < t.rounds / 4 + 1; i++) {
    w.run(
        [&](Pe& pe, int b) {
          for (int d = 1; d < t.pes; d++) {
            const int to = (pe.rank + d) % t.pes;
            auto r = t.random(b, pe.rank, to, i);
            for (int k = 0; k < Traffic::kSlots; k++) {
              const uint64_t n = pick_size(r, t.largest), key = r();
              write_pattern(pe.at(t.source(b, to, k)), n, key);
              queue_put(pe.context, pe.at(t.landing(b, pe.rank, k)), pe.at(t.source(b, to, k)), (int64_t)n, to);
            }
            queue_put_value(pe.context, pe.at(t.lane(b, pe.rank) + 256), r(), 8, to);
            if (i % 3 == 0) pe.quiet(to);
          }
          if (i % 3 == 1) pe.quiet(-1);
          if (i % 3 == 2) { // several flushes at once
            std::vector<uint64_t> tickets;
            for (int d = 1; d < t.pes; d++) tickets.push_back(queue_flush(pe.context, (pe.rank + d) % t.pes));
            for (uint64_t ticket : tickets) CHECK(queue_wait(pe.context, ticket, kOpFlush), "PE %d: flush", pe.rank);
          }
          // The source may be used again at once.
          for (int d = 1; d < t.pes; d++)
            for (int k = 0; k < Traffic::kSlots; k++)
              std::memset(pe.at(t.source(b, (pe.rank + d) % t.pes, k)), 0xee, t.largest);
        },
        t.blocks);
    for (auto& pe : w.pes)
      for (int b = 0; b < t.blocks; b++)
        for (int from = 0; from < t.pes; from++) {
          if (from == pe->rank) continue;
          auto r = t.random(b, from, pe->rank, i);
          for (int k = 0; k < Traffic::kSlots; k++) {
            const uint64_t n = pick_size(r, t.largest), key = r();
            check_pattern(pe->at(t.landing(b, from, k)), n, key, "quiet", pe->rank, from, i);
          }
          const uint64_t value = r();
          CHECK(*pe->at<uint64_t>(t.lane(b, from) + 256) == value, "quiet: value from PE %d", from);
        }
    w.barrier(); // before the next round writes again
  }
}

} // namespace tsn::proxy
