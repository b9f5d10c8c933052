// The cost of sharing endpoints between threads: each endpoint with a control block (domain, address vector, completion
// queue) of its own, used by all threads (FI_THREAD_SAFE) or by one (FI_THREAD_DOMAIN). It drives libfabric itself.
#include <pybind11/pybind11.h>

#include <exception>

#include <rdma/fi_rma.h>
#include <sched.h>
#include <sys/mman.h>

#include "benchmark/native/instruments.h"
#include "tilescale_net/csrc/common/clock.h"
#include "tilescale_net/csrc/common/python.h"
#include "tilescale_net/csrc/fabric/blob.h"
#include "tilescale_net/csrc/fabric/rail.h"

namespace py = pybind11;
using namespace py::literals;

namespace tsn::bench {

using namespace fabric;

namespace {

struct SharingOptions {
  int threads = 1;
  int window = 32;    // operations that a thread has outstanding
  uint64_t bytes = 8; // of one operation
  bool write = false; // reads otherwise
  bool shared = true; // any thread uses any endpoint; otherwise thread t uses endpoints t, t + threads, …
  double duration_s = 1;
  double timeout_s = 30;
};

struct SharingResult {
  std::vector<double> operations_per_s; // by thread
  std::vector<double> cycles_per_post;  // by thread: time stamp counter ticks within the posting call
};

constexpr uint64_t kSharingBytes = 8 << 20;    // that operations go to
constexpr uint32_t kSharingMagic = 0x54534e45; // "TSNE"
// Behind the data: where the initiator writes the number of the round that it has ended, and from where.
constexpr uint64_t kStopWord = kSharingBytes;
constexpr uint64_t kMappedBytes = kSharingBytes + 4096;

// An endpoint and its resources.
class ControlBlock : fabric::Endpoint {
public:
  ControlBlock(const Library& library, fi_info* info, char* buffer, uint64_t bytes, uint64_t key)
      : library_(library), buffer_(buffer), virtual_(info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
    fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_CONTEXT;
    cq_attr.size = 4096;
    open(library, info, cq_attr, cq_attr.size, [this](int rc, const char* call) { check(rc, call); });
    fid_mr* mr;
    check(fi_enable(ep_.get()), "fi_enable");
    check(fi_mr_reg(domain_.get(), buffer, bytes, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, key, 0, &mr,
                    nullptr),
          "fi_mr_reg");
    mr_.reset(mr);
    desc_ = fi_mr_desc(mr);
    if (info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
      check(fi_mr_bind(mr, &ep_->fid, 0), "fi_mr_bind");
      check(fi_mr_enable(mr), "fi_mr_enable");
    }
  }

  void describe(BlobWriter& blob) const {
    char name[512];
    size_t bytes = sizeof name;
    check(fi_getname(&ep_->fid, name, &bytes), "fi_getname");
    blob.text(std::string(name, bytes));
    blob.number(virtual_ ? reinterpret_cast<uint64_t>(buffer_) : 0);
    blob.number(fi_mr_key(mr_.get()));
  }

  void connect(BlobReader& blob) {
    const std::string name = blob.text();
    remote_ = blob.number();
    key_ = blob.number();
    if (fi_av_insert(av_.get(), name.data(), 1, &peer_, 0, nullptr) != 1)
      throw FabricError("the peer's address was not accepted");
  }

  // Offsets into the local and the remote buffer.
  ssize_t post(bool write, uint64_t bytes, uint64_t local, uint64_t remote) {
    return write ? fi_write(ep_.get(), buffer_ + local, bytes, desc_, peer_, remote_ + remote, key_, nullptr)
                 : fi_read(ep_.get(), buffer_ + local, bytes, desc_, peer_, remote_ + remote, key_, nullptr);
  }
  std::string text(ssize_t rc) const { return library_.error(rc); }

  // Completions taken by a thread that was not waiting for one.
  alignas(64) std::atomic<int> spare{0};

  // One completion: 1, none: 0. Throws on an error.
  int take() {
    fi_cq_entry entry;
    const ssize_t n = fi_cq_read(cq_.get(), &entry, 1);
    if (n >= 0) return static_cast<int>(n);
    if (n == -FI_EAGAIN) return 0;
    if (n != -FI_EAVAIL) throw FabricError("reading completions failed: " + library_.error(n));
    union {
      fi_cq_err_entry entry;
      char room[256];
    } error = {};
    fi_cq_readerr(cq_.get(), &error.entry, 0);
    throw FabricError("an operation failed: " + library_.error(-static_cast<int64_t>(error.entry.err)));
  }

private:
  void check(int rc, const char* call) const {
    if (rc) throw FabricError(std::string(call) + " failed: " + library_.error(rc));
  }

  const Library& library_;
  char* buffer_;
  bool virtual_;
  uint64_t remote_ = 0, key_ = 0;
  void* desc_ = nullptr;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  Fid<fid_mr> mr_;
};

// The initiator's endpoint i talks to the target's endpoint i. Both sides construct one, exchange addresses,
// connect(); then, as often as they like, the initiator calls run() and end_round() while the target calls serve().
class SharingBench {
public:
  static constexpr uint64_t kBufferBytes = kSharingBytes;

  SharingBench(const TransportOptions& options, int endpoints, bool thread_safe)
      : library_(load_library(options.library, options.library_fallback)) {
    TransportOptions single = options;
    single.rails = 1;
    single.delivery_complete = false;
    selection_ = select_provider(library_, single, thread_safe ? FI_THREAD_SAFE : FI_THREAD_DOMAIN);
    fi_info* info = selection_.rails[0].get();
    provider_ = provider_name(info);
    if (info->mode & (FI_CONTEXT | FI_CONTEXT2))
      throw FabricError("provider '" + provider_name(info) +
                        "' wants memory behind every operation, which this benchmark does not give");
    void* p = mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p == MAP_FAILED) throw FabricError("no memory for the benchmark's buffer");
    buffer_ = static_cast<char*>(p);
    for (int i = 0; i < endpoints; ++i)
      blocks_.push_back(std::make_unique<ControlBlock>(library_, info, buffer_, kMappedBytes, i + 1));
  }
  ~SharingBench() {
    blocks_.clear();
    if (buffer_) munmap(buffer_, kMappedBytes);
  }

  std::string address() const {
    BlobWriter blob(kSharingMagic);
    for (const auto& block : blocks_) block->describe(blob);
    return blob.take();
  }
  void connect(const std::string& address) {
    BlobReader blob(address, kSharingMagic, "the address of the peer");
    for (auto& block : blocks_) block->connect(blob);
  }
  const std::string& provider() const { return provider_; }
  int endpoints() const { return static_cast<int>(blocks_.size()); }

  // The initiator: measures. Throws FabricError naming the thread and endpoint of a failed operation, or of one that
  // does not complete.
  SharingResult run(const SharingOptions& options) {
    // Connections are made before the clock runs.
    for (int e = 0; e < static_cast<int>(blocks_.size()); ++e)
      Worker(*this, options, 0, options.timeout_s).one(e, options.write, options.bytes, 0, 0);

    std::vector<Worker> workers;
    for (int t = 0; t < options.threads; ++t) workers.emplace_back(*this, options, t, options.timeout_s);
    std::vector<std::thread> threads;
    std::atomic<int> ready{0};
    std::atomic<bool> go{false}, stop{false};
    for (Worker& worker : workers)
      threads.emplace_back([&] {
        ++ready;
        while (!go) sched_yield();
        worker.run(stop);
      });
    while (ready < options.threads) sched_yield();
    go = true;
    const auto start = Clock::now();
    while (seconds_since(start) < options.duration_s && !stop)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stop = true;
    for (std::thread& thread : threads) thread.join();
    SharingResult result;
    for (Worker& worker : workers) {
      if (worker.failure) std::rethrow_exception(worker.failure);
      result.operations_per_s.push_back(worker.count / worker.seconds);
      result.cycles_per_post.push_back(worker.count ? static_cast<double>(worker.cycles) / worker.count : 0);
    }
    return result;
  }
  // The initiator: notifies the target that round number `round` (1, 2, …) is over.
  void end_round(uint64_t round, double timeout_s) {
    *word(kStopWord + 64) = round;
    Worker(*this, {}, 0, timeout_s).one(0, true, sizeof round, kStopWord + 64, kStopWord);
  }
  // The target: drives progress until the initiator has ended that round.
  void serve(uint64_t round, double timeout_s) {
    const auto start = Clock::now();
    while (*word(kStopWord) < round) {
      int n = 0;
      for (auto& block : blocks_) n += block->take();
      if (n) continue;
      sched_yield();
      if (seconds_since(start) > timeout_s)
        throw FabricError(concat("the initiator has not ended its round within ", static_cast<int>(timeout_s),
                                 " s; it has ended, or the network between the two is broken"));
    }
  }

private:
  // One thread's loop. The method is FaSST's: once `window` operations are out, the completion of the oldest is awaited
  // at the endpoint that it went to, then the next goes to a random endpoint and a random place.
  class Worker {
  public:
    Worker(SharingBench& bench, const SharingOptions& options, int thread, double timeout_s)
        : blocks_(bench.blocks_), o_(options), thread_(thread), timeout_s_(timeout_s),
          state_(thread * 2654435761u + 1) {}

    void run(std::atomic<bool>& stop) {
      try {
        const auto start = Clock::now();
        std::vector<int> used(o_.window);
        for (; !stop.load(std::memory_order_relaxed); ++count) {
          int& oldest = used[count % o_.window];
          if (count >= static_cast<uint64_t>(o_.window)) await(oldest);
          oldest = pick();
          post(oldest, o_.write, o_.bytes, place(), place());
        }
        for (uint64_t i = count - std::min<uint64_t>(count, o_.window); i < count; ++i) await(used[i % o_.window]);
        seconds = seconds_since(start);
      } catch (...) {
        failure = std::current_exception();
        stop = true;
      }
    }

    // One operation and its completion.
    void one(int endpoint, bool write, uint64_t bytes, uint64_t from, uint64_t to) {
      post(endpoint, write, bytes, from, to);
      await(endpoint);
    }

    uint64_t count = 0, cycles = 0;
    double seconds = 0;
    std::exception_ptr failure;

  private:
    uint64_t random() { // xorshift64: far cheaper than the measured calls
      state_ ^= state_ << 13;
      state_ ^= state_ >> 7;
      return state_ ^= state_ << 17;
    }
    int pick() {
      const int n = static_cast<int>(blocks_.size());
      if (o_.shared) return static_cast<int>(random() % n);
      const int mine = (n - thread_ + o_.threads - 1) / o_.threads;
      return thread_ + o_.threads * static_cast<int>(random() % mine);
    }
    uint64_t place() { return random() % (kBufferBytes / o_.bytes) * o_.bytes; }

    void post(int endpoint, bool write, uint64_t bytes, uint64_t from, uint64_t to) {
      ControlBlock& block = *blocks_[endpoint];
      Deadline deadline(*this, endpoint);
      for (;;) {
        const uint64_t before = ticks();
        const ssize_t rc = block.post(write, bytes, from, to);
        cycles += ticks() - before;
        if (rc == 0) return;
        if (rc != -FI_EAGAIN)
          throw FabricError(
              concat("thread ", thread_, ", endpoint ", endpoint, ": an operation was refused: ", block.text(rc)));
        // The queue is full: a completion taken now is kept for the thread that awaits it.
        if (block.take()) block.spare.fetch_add(1, std::memory_order_relaxed);
        else deadline.check();
      }
    }

    void await(int endpoint) {
      ControlBlock& block = *blocks_[endpoint];
      Deadline deadline(*this, endpoint);
      for (;;) {
        int spare = block.spare.load(std::memory_order_relaxed);
        if (spare > 0 && block.spare.compare_exchange_strong(spare, spare - 1, std::memory_order_relaxed)) return;
        if (block.take()) return;
        deadline.check();
      }
    }

    struct Deadline {
      Deadline(Worker& worker, int endpoint) : worker(worker), endpoint(endpoint) {}
      void check() {
        if (++turns < 1000) return;
        if (turns == 1000) start = Clock::now();
        sched_yield();
        if (seconds_since(start) > worker.timeout_s_)
          throw FabricError(concat("thread ", worker.thread_, ", endpoint ", endpoint, ": nothing has completed for ",
                                   static_cast<int>(worker.timeout_s_),
                                   " s; the target has ended, or the network between the two is broken"));
      }
      Worker& worker;
      int endpoint;
      uint64_t turns = 0;
      Clock::time_point start;
    };

    std::vector<std::unique_ptr<ControlBlock>>& blocks_;
    const SharingOptions o_;
    const int thread_;
    const double timeout_s_;
    uint64_t state_;
  };

  volatile uint64_t* word(uint64_t offset) { return reinterpret_cast<volatile uint64_t*>(buffer_ + offset); }

  const Library& library_;
  fabric::Selection selection_; // as long as the endpoints
  std::string provider_;
  std::vector<std::unique_ptr<ControlBlock>> blocks_;
  char* buffer_ = nullptr;
};

py::dict run_sharing(SharingBench& bench, const py::kwargs& kwargs) {
  SharingOptions o;
  KeywordFields("SharingBench.run")
      .add(TSN_NAMED(o.threads, o.window, o.bytes, o.write, o.shared, o.duration_s, o.timeout_s))
      .set(kwargs);
  if (o.threads < 1 || o.window < 1 || o.bytes < 1 || o.bytes > SharingBench::kBufferBytes ||
      (!o.shared && bench.endpoints() < o.threads))
    throw py::value_error("threads, window and bytes are 1 or more; exclusive use needs an endpoint for every thread");
  SharingResult result;
  {
    py::gil_scoped_release release;
    result = bench.run(o);
  }
  return dict_of(TSN_NAMED(result.operations_per_s, result.cycles_per_post));
}

} // namespace

void bind_sharing(py::module_& m) {
  py::class_<SharingBench>(m, "SharingBench", "Endpoints with control blocks of their own.")
      .def(py::init<const TransportOptions&, int, bool>(), "options"_a, "endpoints"_a, "thread_safe"_a)
      .def("address", [](const SharingBench& b) { return py::bytes(b.address()); })
      .def("connect", &SharingBench::connect)
      .def("provider", &SharingBench::provider)
      .def("run", &run_sharing, "Keyword arguments are the fields of SharingOptions.")
      .def("end_round", &SharingBench::end_round, py::call_guard<py::gil_scoped_release>())
      .def("serve", &SharingBench::serve, py::call_guard<py::gil_scoped_release>());
}

} // namespace tsn::bench
