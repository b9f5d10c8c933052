// libefa and libibverbs without a device: SRD between processes of one host, so that libfabric's own efa provider runs.
//
// libfabric's efa provider reaches a device through these functions and the tables of functions that they return. Here
// a thread per process stands for the NIC. It carries out the posted work requests: it copies into and out of the
// target process with process_vm_writev and process_vm_readv, takes receives from the target's queue, and appends
// completions to the target's completion queue. Queues and memory registrations lie in a memory file of each process,
// which others map through /proc/PID/fd/N. A GID holds both numbers, so addresses need no directory, and a process that
// ends leaves nothing behind.
//
// As SRD does, it delivers each message once and in any order, and the bytes of a write in any order; a write's
// immediate follows its bytes. EFA_STANDIN sets it up, as name=value with commas:
//   device=p5      p4d (RDMA read), p5, p5en, p6 (RDMA read and write, unsolicited immediates)
//   nics=1         devices of each process
//   window=8       posted operations from which the next one is chosen at random
//   rnr_us=50      time before a message is sent again to a queue without receives
//   timeout_ms=5000  silence of a stopped process after which operations fail
//   dmabuf=0       whether registration of GPU memory by DMABUF succeeds
//   seed=1         of the order
//   log=0          1: a line for each operation that ends, to stderr
#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/efadv.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;

// Of newer headers than Debian 12's.
constexpr uint32_t kRdmaRead = 1, kRnrRetry = 2, kCqWithSgid = 4, kRdmaWrite = 8, kUnsolicited = 16;
constexpr uint16_t kQpUnsolicited = 1;
constexpr uint64_t kWcUnsolicited = 2;

// Completion codes of the device, which the provider reports as the vendor's error.
enum Code : uint32_t {
  kOk = 0,
  kFlushed = 1,
  kInvalidLkey = 5,
  kBadLength = 6,
  kBadAddress = 7,
  kBadDestQpn = 9,
  kRnr = 10,
  kRemoteBadLength = 11,
  kUnresponsive = 13,
  kUnreachable = 15,
};

ibv_wc_status status_of(uint32_t code) {
  switch (code) {
  case kOk:
    return IBV_WC_SUCCESS;
  case kFlushed:
    return IBV_WC_WR_FLUSH_ERR;
  case kInvalidLkey:
    return IBV_WC_LOC_PROT_ERR;
  case kBadLength:
    return IBV_WC_LOC_LEN_ERR;
  case kBadAddress:
    return IBV_WC_REM_ACCESS_ERR;
  case kBadDestQpn:
    return IBV_WC_REM_INV_RD_REQ_ERR;
  case kRnr:
    return IBV_WC_RNR_RETRY_EXC_ERR;
  case kRemoteBadLength:
    return IBV_WC_REM_INV_REQ_ERR;
  case kUnresponsive:
    return IBV_WC_RESP_TIMEOUT_ERR;
  default:
    return IBV_WC_GENERAL_ERR;
  }
}

struct Options {
  std::string device = "p5";
  uint64_t nics = 1, window = 8, rnr_us = 50, timeout_ms = 5000, dmabuf = 0, seed = 1, log = 0;

  Options() {
    const char* text = getenv("EFA_STANDIN");
    std::string rest = text ? text : "";
    const std::map<std::string, uint64_t*> numbers{
        {"nics", &nics}, {"window", &window}, {"rnr_us", &rnr_us},        {"dmabuf", &dmabuf},
        {"seed", &seed}, {"log", &log},       {"timeout_ms", &timeout_ms}};
    while (!rest.empty()) {
      const size_t end = std::min(rest.find(','), rest.size()), equals = rest.find('=');
      const std::string name = rest.substr(0, std::min(equals, end));
      const std::string value = equals < end ? rest.substr(equals + 1, end - equals - 1) : "";
      if (name == "device" && (value == "p4d" || value == "p5" || value == "p5en" || value == "p6")) {
        device = value;
      } else if (char* stop = nullptr; numbers.count(name) && !value.empty()) {
        *numbers.at(name) = strtoull(value.c_str(), &stop, 10);
        if (*stop) name_error(name + "=" + value);
      } else {
        name_error(name + "=" + value);
      }
      rest.erase(0, end + 1);
    }
    window = std::max<uint64_t>(window, 1);
  }

  [[noreturn]] static void name_error(const std::string& what) {
    fprintf(stderr, "EFA_STANDIN: %s is not an option; see tests/efa/standin.cpp\n", what.c_str());
    _exit(2);
  }

  bool writes() const { return device != "p4d"; }
};

const Options& options() {
  static const Options made;
  return made;
}

// As published for the instance types; the depths are those that the driver reports.
constexpr uint32_t kSqDepth = 4096, kRqDepth = 32768, kSqSges = 2, kRqSges = 3, kInline = 32, kMtu = 8928;
constexpr uint32_t kMaxRdma = 1u << 30;
constexpr uint32_t kMaxQps = 32, kMaxCqs = 32, kMaxMrs = 8192, kCqDepth = 65536;

struct Lock {
  explicit Lock(pthread_mutex_t& m) : m(m) {
    // The process that held it was killed between two words of a queue: its unfinished work never happened.
    if (pthread_mutex_lock(&m) == EOWNERDEAD) pthread_mutex_consistent(&m);
  }
  ~Lock() { pthread_mutex_unlock(&m); }
  pthread_mutex_t& m;
};

struct Receive {
  uint64_t wr_id;
  uint32_t sges;
  ibv_sge sge[kRqSges];
};

struct Completion {
  uint64_t wr_id;
  uint32_t code, opcode, length, imm, flags, qp, src_qp, unsolicited;
  ibv_gid gid;
};

// What other processes read and write.
struct SharedQp {
  pthread_mutex_t lock;
  uint32_t live, number, cq, qkey, unsolicited;
  uint64_t posted, taken;
  Receive receives[kRqDepth];
};
struct SharedCq {
  pthread_mutex_t lock;
  uint32_t live;
  uint64_t pushed, polled;
  Completion entries[kCqDepth];
};
struct SharedMr {
  std::atomic<uint64_t> live; // the key while it is registered
  uint64_t address, length;
  uint32_t access;
};
struct SharedProcess {
  std::atomic<uint64_t> magic;
  SharedQp qps[kMaxQps];
  SharedCq cqs[kMaxCqs];
  SharedMr mrs[kMaxMrs];
};
constexpr uint64_t kMagic = 0x7472616e73726431;

struct GidFields {
  uint8_t prefix[2], nic, zero;
  uint32_t fd, pid, start;
};
static_assert(sizeof(GidFields) == sizeof(ibv_gid));

// What /proc says of a process; `start` is 0 when it has ended.
struct ProcessState {
  uint32_t start = 0;
  bool stopped = false;
};

ProcessState state_of(pid_t pid) {
  char path[40], text[512] = {};
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  const char* at = got > 0 ? strrchr(text, ')') : nullptr;
  if (!at || at[2] == 'Z' || at[2] == 'X') return {};
  const bool stopped = at[2] == 'T' || at[2] == 't';
  for (int field = 0; field < 20 && at; ++field) at = strchr(at + 1, ' ');
  return {at ? uint32_t(strtoull(at, nullptr, 10)) : 0, stopped};
}

struct Ah {
  ibv_ah base{};
  ibv_gid gid{};
  uint16_t number = 0;
};

struct Qp;

struct Operation {
  enum Kind { kSend, kWrite, kRead } kind = kSend;
  Qp* qp = nullptr;
  uint64_t wr_id = 0;
  bool has_imm = false;
  uint32_t imm = 0, rkey = 0, remote_qpn = 0, remote_qkey = 0;
  uint64_t remote_address = 0;
  ibv_gid gid{};
  std::vector<ibv_sge> sges;
  std::string inlined;
  bool is_inline = false, placed = false;
  Clock::time_point due{}, begun{};
};

struct Cq {
  ibv_cq_ex base{};
  efadv_cq efa{};
  uint64_t efa_more[2]{}; // functions that newer headers append
  SharedCq* shared = nullptr;
  Completion current{};
};

struct Qp {
  ibv_qp_ex base{};
  SharedQp* shared = nullptr;
  ibv_gid gid{}; // of the device that it belongs to
  Cq *send_cq = nullptr, *recv_cq = nullptr;
  uint32_t depth = kSqDepth, rnr_retry = 7;
  uint32_t outstanding = 0; // guarded by the NIC's lock
  std::vector<Operation> building;
  std::mutex building_lock;
};

int bad(int code) {
  errno = code;
  return code;
}

// This process's memory file and its thread.
class Nic {
public:
  static Nic& get() {
    static Nic* nic = new Nic; // never destroyed: the provider's own thread may outlive main
    return *nic;
  }

  ibv_gid gid(uint8_t index) const {
    GidFields fields{{0xfe, 0x80}, index, 0, uint32_t(fd_), uint32_t(getpid()), start_};
    ibv_gid out;
    memcpy(&out, &fields, sizeof out);
    return out;
  }

  SharedProcess& own() { return *own_; }

  uint32_t reserve_qp(uint32_t cq, uint32_t qkey, bool unsolicited) {
    std::lock_guard<std::mutex> held(lock_);
    for (uint32_t i = 0; i < kMaxQps; ++i) {
      SharedQp& qp = own_->qps[i];
      if (qp.live) continue;
      Lock inner(qp.lock);
      qp.number = ++numbers_ * kMaxQps + i;
      qp.cq = cq, qp.qkey = qkey, qp.unsolicited = unsolicited;
      qp.posted = qp.taken = 0;
      qp.live = 1;
      return i;
    }
    return kMaxQps;
  }

  int post(Qp* qp, std::vector<Operation>&& operations) {
    std::lock_guard<std::mutex> held(lock_);
    if (qp->outstanding + operations.size() > qp->depth) return bad(ENOMEM);
    qp->outstanding += operations.size();
    for (Operation& op : operations) {
      op.begun = Clock::now();
      pending_.push_back(std::move(op));
    }
    if (!running_) {
      running_ = true;
      std::thread([this] { run(); }).detach();
    }
    wake_.notify_one();
    return 0;
  }

  // Operations of a queue pair that is destroyed end with it.
  void drop(Qp* qp) {
    std::unique_lock<std::mutex> held(lock_);
    idle_.wait(held, [&] { return busy_ != qp; });
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), [&](Operation& op) { return op.qp == qp; }),
                   pending_.end());
  }

  uint16_t ah_number(const ibv_gid& gid) {
    std::lock_guard<std::mutex> held(names_lock_);
    const auto found = names_.emplace(std::string(reinterpret_cast<const char*>(gid.raw), 16), names_.size() + 1);
    return uint16_t(found.first->second);
  }

  // 0xffff: no address handle leads there, as the device reports it.
  uint16_t known_ah(const ibv_gid& gid) {
    std::lock_guard<std::mutex> held(names_lock_);
    const auto found = names_.find(std::string(reinterpret_cast<const char*>(gid.raw), 16));
    return found == names_.end() ? 0xffff : uint16_t(found->second);
  }

  static void push(SharedProcess& process, uint32_t cq, const Completion& completion) {
    SharedCq& to = process.cqs[cq];
    Lock held(to.lock);
    if (!to.live) return;
    if (to.pushed - to.polled >= kCqDepth) {
      fprintf(stderr, "efa stand-in: a completion queue overflowed\n");
      abort();
    }
    to.entries[to.pushed++ % kCqDepth] = completion;
  }

private:
  Nic() : random_(options().seed * 7919 + getpid()) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    fd_ = memfd_create("efa", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, sizeof(SharedProcess))) abort();
    own_ = static_cast<SharedProcess*>(
        mmap(nullptr, sizeof(SharedProcess), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0));
    if (own_ == MAP_FAILED) abort();
    start_ = state_of(getpid()).start;
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    for (SharedQp& qp : own_->qps) pthread_mutex_init(&qp.lock, &kind);
    for (SharedCq& cq : own_->cqs) pthread_mutex_init(&cq.lock, &kind);
    own_->magic = kMagic;
  }

  void run() {
    std::unique_lock<std::mutex> held(lock_);
    while (true) {
      if (pending_.empty()) {
        wake_.wait(held);
        continue;
      }
      // One of the first `window` operations that are due; a message that waits for a receive lets others pass.
      const auto now = Clock::now();
      std::vector<size_t> due;
      Clock::time_point next = now + std::chrono::milliseconds(100);
      for (size_t i = 0; i < pending_.size() && due.size() < options().window; ++i) {
        if (pending_[i].due <= now) due.push_back(i);
        else next = std::min(next, pending_[i].due);
      }
      if (due.empty()) {
        wake_.wait_until(held, next);
        continue;
      }
      const size_t chosen = due[random_() % due.size()];
      Operation op = std::move(pending_[chosen]);
      pending_.erase(pending_.begin() + chosen);
      busy_ = op.qp;
      held.unlock();
      uint32_t code = kOk;
      const bool done = carry_out(op, code);
      if (done) complete(op, code);
      held.lock();
      busy_ = nullptr;
      if (done) --op.qp->outstanding;
      else pending_.push_back(std::move(op));
      idle_.notify_all();
    }
  }

  struct Peer {
    SharedProcess* memory = nullptr;
    pid_t pid = 0;
    uint32_t start = 0;
  };

  // Null: the process has ended, or cannot be reached.
  Peer* peer(const ibv_gid& gid) {
    GidFields fields;
    memcpy(&fields, &gid, sizeof fields);
    const auto key = std::make_pair(fields.pid, fields.start);
    auto found = peers_.find(key);
    if (found == peers_.end()) {
      Peer made{nullptr, pid_t(fields.pid), fields.start};
      if (made.pid == getpid()) {
        made.memory = own_;
      } else if (state_of(made.pid).start == made.start) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%u/fd/%u", fields.pid, fields.fd);
        const int fd = open(path, O_RDWR | O_CLOEXEC);
        void* at =
            fd < 0 ? MAP_FAILED
                   : mmap(nullptr, sizeof(SharedProcess), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (fd >= 0) close(fd);
        if (at != MAP_FAILED) made.memory = static_cast<SharedProcess*>(at);
      }
      if (!made.memory || made.memory->magic != kMagic) return nullptr;
      found = peers_.emplace(key, made).first;
    }
    return &found->second;
  }

  static const SharedMr* registration(SharedProcess& process, uint32_t key, uint64_t address, uint64_t length) {
    const SharedMr& mr = process.mrs[key % kMaxMrs];
    if (mr.live != key || address < mr.address || address + length > mr.address + mr.length) return nullptr;
    return &mr;
  }

  std::vector<iovec> local(Operation& op, uint32_t& code) {
    std::vector<iovec> out;
    if (op.is_inline) {
      out.push_back({op.inlined.data(), op.inlined.size()});
      return out;
    }
    for (const ibv_sge& sge : op.sges) {
      if (!registration(*own_, sge.lkey, sge.addr, sge.length)) {
        code = kInvalidLkey;
        return {};
      }
      out.push_back({reinterpret_cast<void*>(sge.addr), sge.length});
    }
    return out;
  }

  // Copies between this process and another in pieces, in random order. False: the other process is gone.
  bool copy(const Peer& to, const std::vector<iovec>& here, const std::vector<iovec>& there, bool writes) {
    struct Piece {
      iovec local, remote;
    };
    std::vector<Piece> pieces;
    size_t h = 0, t = 0, h_at = 0, t_at = 0;
    while (h < here.size() && t < there.size()) {
      const size_t n = std::min({here[h].iov_len - h_at, there[t].iov_len - t_at, size_t(64) << 10});
      if (n)
        pieces.push_back(
            {{static_cast<char*>(here[h].iov_base) + h_at, n}, {static_cast<char*>(there[t].iov_base) + t_at, n}});
      h_at += n, t_at += n;
      if (h_at == here[h].iov_len) ++h, h_at = 0;
      if (t < there.size() && t_at == there[t].iov_len) ++t, t_at = 0;
    }
    std::shuffle(pieces.begin(), pieces.end(), random_);
    for (const Piece& piece : pieces) {
      const ssize_t n = writes ? process_vm_writev(to.pid, &piece.local, 1, &piece.remote, 1, 0)
                               : process_vm_readv(to.pid, &piece.local, 1, &piece.remote, 1, 0);
      if (n != ssize_t(piece.local.iov_len)) return false;
    }
    return true;
  }

  // False: not yet. `code` says how it ended.
  bool carry_out(Operation& op, uint32_t& code) {
    Peer* to = peer(op.gid);
    const ProcessState state = to ? state_of(to->pid) : ProcessState{};
    const bool gone = !to || state.start != to->start;
    if (gone || state.stopped) {
      code = gone ? kUnreachable : kUnresponsive;
      op.due = Clock::now() + std::chrono::milliseconds(20);
      const auto patience = std::chrono::milliseconds(gone ? options().timeout_ms / 10 : options().timeout_ms);
      return Clock::now() - op.begun > patience;
    }
    std::vector<iovec> here = local(op, code);
    if (code) return true;
    uint64_t length = 0;
    for (const iovec& part : here) length += part.iov_len;
    if (op.kind == Operation::kSend && length > kMtu) return code = kBadLength, true;
    if (op.kind != Operation::kSend && length > kMaxRdma) return code = kBadLength, true;

    SharedProcess& process = *to->memory;
    SharedQp& qp = process.qps[op.remote_qpn % kMaxQps];
    {
      Lock held(qp.lock);
      if (!qp.live || qp.number != op.remote_qpn || qp.qkey != op.remote_qkey) return code = kBadDestQpn, true;
    }
    if (op.kind != Operation::kSend && length && !op.placed) {
      const SharedMr* mr = registration(process, op.rkey, op.remote_address, length);
      const uint32_t needs = op.kind == Operation::kRead ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
      if (!mr || !(mr->access & needs)) return code = kBadAddress, true;
      if (!copy(*to, here, {{reinterpret_cast<void*>(op.remote_address), length}}, op.kind == Operation::kWrite))
        return again(op);
      op.placed = true;
    }
    if (op.kind == Operation::kRead || (op.kind == Operation::kWrite && !op.has_imm)) return true;
    return receive(op, *to, qp, here, length, code);
  }

  // The target went away meanwhile; what to report is decided by the next try.
  bool again(Operation& op) {
    op.due = Clock::now() + std::chrono::milliseconds(1);
    return false;
  }

  // A message, or a write's immediate, takes a receive of the target.
  bool receive(Operation& op, Peer& to, SharedQp& qp, const std::vector<iovec>& here, uint64_t length, uint32_t& code) {
    Completion done{};
    const bool unsolicited = op.kind == Operation::kWrite && qp.unsolicited;
    std::vector<iovec> there;
    uint64_t room = 0;
    if (!unsolicited) {
      Lock held(qp.lock);
      if (qp.taken == qp.posted) {
        code = kRnr;
        op.due = Clock::now() + std::chrono::microseconds(options().rnr_us);
        return op.qp->rnr_retry < 7 && Clock::now() - op.begun > std::chrono::milliseconds(op.qp->rnr_retry);
      }
      const Receive& receive = qp.receives[qp.taken++ % kRqDepth];
      done.wr_id = receive.wr_id;
      for (uint32_t i = 0; i < receive.sges; ++i) {
        there.push_back({reinterpret_cast<void*>(receive.sge[i].addr), receive.sge[i].length});
        room += receive.sge[i].length;
      }
    }
    if (op.kind == Operation::kSend) {
      if (length > room) done.code = kBadLength, code = kRemoteBadLength;
      if (!code && !copy(to, here, there, true)) return again(op);
    }
    done.opcode = op.kind == Operation::kSend ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
    done.length = uint32_t(length);
    done.imm = op.imm;
    done.flags = op.has_imm ? IBV_WC_WITH_IMM : 0;
    done.qp = qp.number;
    done.src_qp = op.qp->base.qp_base.qp_num;
    done.unsolicited = unsolicited;
    done.gid = op.qp->gid;
    push(*to.memory, qp.cq, done);
    return true;
  }

  void complete(const Operation& op, uint32_t code) {
    if (options().log) {
      const char* const names[] = {"send", "write", "read"};
      uint64_t length = op.inlined.size();
      for (const ibv_sge& sge : op.sges) length += sge.length;
      fprintf(stderr, "efa stand-in: %d %s %llu bytes imm %d to %u code %u\n", getpid(), names[op.kind],
              static_cast<unsigned long long>(length), op.has_imm, op.remote_qpn, code);
    }
    Completion done{};
    done.wr_id = op.wr_id;
    done.code = code;
    done.opcode = op.kind == Operation::kSend    ? IBV_WC_SEND
                  : op.kind == Operation::kWrite ? IBV_WC_RDMA_WRITE
                                                 : IBV_WC_RDMA_READ;
    done.qp = op.qp->base.qp_base.qp_num;
    done.src_qp = op.remote_qpn;
    done.gid = op.gid;
    push(*own_, uint32_t(op.qp->send_cq->shared - own_->cqs), done);
  }

  int fd_ = -1;
  uint32_t start_ = 0, numbers_ = 0;
  SharedProcess* own_ = nullptr;
  std::mutex lock_, names_lock_;
  std::condition_variable wake_, idle_;
  std::deque<Operation> pending_;
  Qp* busy_ = nullptr;
  bool running_ = false;
  std::map<std::pair<uint32_t, uint32_t>, Peer> peers_;
  std::map<std::string, size_t> names_;
  std::mt19937_64 random_;
};

// ---- verbs: devices ----

struct Device {
  ibv_device base{};
  uint8_t index = 0;
};

struct Context {
  verbs_context extended{};
  Device* device = nullptr;
};

Context* context_of(ibv_context* context) {
  return reinterpret_cast<Context*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context));
}

// Where this library lies, with the part of /sys that the provider reads beside it (build.sh).
std::string folder() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&folder), &info);
  const std::string file = info.dli_fname;
  return file.substr(0, file.rfind('/'));
}

// Before libfabric looks for devices and providers. Where its efa provider is a file of its own, that one finds these
// functions only if all that is loaded does.
__attribute__((constructor)) void introduce() {
  setenv("SYSFS_PATH", (folder() + "/sys").c_str(), 1);
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&fi_version), &info)) return;
  const std::string library = info.dli_fname, plugins = library.substr(0, library.rfind('/')) + "/libfabric";
  if (access((plugins + "/libefa-fi.so").c_str(), R_OK)) return;
  setenv("FI_PROVIDER_PATH", plugins.c_str(), 0);
  dladdr(reinterpret_cast<void*>(&introduce), &info);
  if (!dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL)) {
    fprintf(stderr, "efa stand-in: %s\n", dlerror());
    _exit(2);
  }
}

std::vector<Device>& devices() {
  static std::vector<Device> all = [] {
    std::vector<Device> made(options().nics);
    for (size_t i = 0; i < made.size(); ++i) {
      Device& d = made[i];
      d.index = uint8_t(i);
      d.base.node_type = IBV_NODE_UNSPECIFIED;
      d.base.transport_type = IBV_TRANSPORT_UNSPECIFIED;
      snprintf(d.base.name, sizeof d.base.name, "rdmap%zus0", i);
      snprintf(d.base.dev_name, sizeof d.base.dev_name, "uverbs%zu", i);
      const std::string sys = folder() + "/sys/class/";
      snprintf(d.base.dev_path, sizeof d.base.dev_path, "%sinfiniband_verbs/uverbs%zu", sys.c_str(), i);
      snprintf(d.base.ibdev_path, sizeof d.base.ibdev_path, "%sinfiniband/rdmap%zus0", sys.c_str(), i);
    }
    return made;
  }();
  return all;
}

int query_port(ibv_context*, uint8_t, ibv_port_attr* attr, size_t length) {
  ibv_port_attr filled{};
  filled.state = IBV_PORT_ACTIVE;
  filled.max_mtu = filled.active_mtu = IBV_MTU_4096;
  filled.max_msg_sz = kMtu;
  filled.gid_tbl_len = 1;
  filled.pkey_tbl_len = 1;
  filled.lid = 1;
  // Four lanes: 100 Gbit/s of a NIC of p4d and p5, 200 of p5en, 400 of p6.
  const bool p5en = options().device == "p5en", p6 = options().device == "p6";
  filled.active_width = 2, filled.active_speed = p6 ? 128 : p5en ? 64 : 32;
  filled.link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  memcpy(attr, &filled, std::min(length, sizeof filled));
  return 0;
}

int query_device(ibv_context*, ibv_device_attr* attr) {
  *attr = {};
  snprintf(attr->fw_ver, sizeof attr->fw_ver, "stand-in");
  attr->max_mr_size = uint64_t(1) << 40;
  attr->page_size_cap = 0xfffff000;
  attr->vendor_id = 0x1d0f;
  attr->vendor_part_id = options().device == "p4d" ? 0xefa1 : options().device == "p5" ? 0xefa2 : 0xefa3;
  attr->max_qp = kMaxQps, attr->max_cq = kMaxCqs, attr->max_mr = kMaxMrs, attr->max_pd = 256, attr->max_ah = 8192;
  attr->max_qp_wr = kSqDepth, attr->max_cqe = kCqDepth / 2, attr->max_sge = kSqSges, attr->max_sge_rd = 1;
  attr->phys_port_cnt = 1;
  return 0;
}

// ---- completion queues ----

Cq* cq_of(ibv_cq_ex* cq) { return reinterpret_cast<Cq*>(cq); }

bool pop(Cq* cq) {
  Lock held(cq->shared->lock);
  if (cq->shared->polled == cq->shared->pushed) return false;
  cq->current = cq->shared->entries[cq->shared->polled++ % kCqDepth];
  cq->base.wr_id = cq->current.wr_id;
  cq->base.status = status_of(cq->current.code);
  return true;
}

int next_poll(ibv_cq_ex* cq) { return pop(cq_of(cq)) ? 0 : ENOENT; }
int start_poll(ibv_cq_ex* cq, ibv_poll_cq_attr*) { return next_poll(cq); }
void end_poll(ibv_cq_ex*) {}
// The rdma-core that libfabric 1.17 was built with calls all that was sent IBV_WC_SEND; the provider takes no other.
ibv_wc_opcode read_opcode(ibv_cq_ex* cq) {
  const auto opcode = ibv_wc_opcode(cq_of(cq)->current.opcode);
  static const bool one_for_all = fi_version() < FI_VERSION(1, 18);
  return one_for_all && opcode < IBV_WC_RECV ? IBV_WC_SEND : opcode;
}
uint32_t read_vendor_err(ibv_cq_ex* cq) { return cq_of(cq)->current.code; }
uint32_t read_byte_len(ibv_cq_ex* cq) { return cq_of(cq)->current.length; }
__be32 read_imm_data(ibv_cq_ex* cq) { return cq_of(cq)->current.imm; }
uint32_t read_qp_num(ibv_cq_ex* cq) { return cq_of(cq)->current.qp; }
uint32_t read_src_qp(ibv_cq_ex* cq) { return cq_of(cq)->current.src_qp; }
unsigned read_wc_flags(ibv_cq_ex* cq) { return cq_of(cq)->current.flags; }
uint32_t read_slid(ibv_cq_ex* cq) { return Nic::get().known_ah(cq_of(cq)->current.gid); }
uint8_t read_zero(ibv_cq_ex*) { return 0; }
int read_sgid(efadv_cq* cq, ibv_gid* gid) {
  const Cq* whole = reinterpret_cast<const Cq*>(reinterpret_cast<const char*>(cq) - offsetof(Cq, efa));
  *gid = whole->current.gid;
  return Nic::get().known_ah(*gid) == 0xffff ? 0 : -ENOENT;
}
bool is_unsolicited(efadv_cq* cq) {
  return reinterpret_cast<const Cq*>(reinterpret_cast<const char*>(cq) - offsetof(Cq, efa))->current.unsolicited;
}

int poll_cq(ibv_cq* plain, int room, ibv_wc* out) {
  Cq* cq = reinterpret_cast<Cq*>(plain);
  int n = 0;
  for (; n < room && pop(cq); ++n) {
    out[n] = {};
    out[n].wr_id = cq->base.wr_id, out[n].status = cq->base.status;
    out[n].opcode = ibv_wc_opcode(cq->current.opcode), out[n].vendor_err = cq->current.code;
    out[n].byte_len = cq->current.length, out[n].imm_data = cq->current.imm, out[n].qp_num = cq->current.qp;
    out[n].src_qp = cq->current.src_qp, out[n].wc_flags = cq->current.flags;
    out[n].slid = Nic::get().known_ah(cq->current.gid);
  }
  return n;
}

ibv_cq_ex* make_cq(ibv_context* context, ibv_cq_init_attr_ex* attr) {
  SharedProcess& own = Nic::get().own();
  for (SharedCq& shared : own.cqs) {
    Lock held(shared.lock);
    if (shared.live) continue;
    shared.live = 1, shared.pushed = shared.polled = 0;
    Cq* cq = new Cq;
    cq->shared = &shared;
    ibv_cq_ex& b = cq->base;
    b.context = context, b.channel = attr->channel, b.cq_context = attr->cq_context, b.cqe = int(attr->cqe);
    b.start_poll = start_poll, b.next_poll = next_poll, b.end_poll = end_poll, b.read_opcode = read_opcode;
    b.read_vendor_err = read_vendor_err, b.read_byte_len = read_byte_len, b.read_imm_data = read_imm_data;
    b.read_qp_num = read_qp_num, b.read_src_qp = read_src_qp, b.read_wc_flags = read_wc_flags;
    b.read_slid = read_slid, b.read_sl = read_zero, b.read_dlid_path_bits = read_zero;
    cq->efa.wc_read_sgid = read_sgid;
    cq->efa_more[0] = reinterpret_cast<uint64_t>(&is_unsolicited);
    return &b;
  }
  errno = ENOMEM;
  return nullptr;
}

// ---- queue pairs ----

Qp* qp_of(ibv_qp_ex* qp) { return reinterpret_cast<Qp*>(qp); }

Operation& begin(ibv_qp_ex* qp, Operation::Kind kind) {
  Qp* q = qp_of(qp);
  Operation op;
  op.kind = kind, op.qp = q, op.wr_id = qp->wr_id;
  q->building.push_back(std::move(op));
  return q->building.back();
}
void wr_start(ibv_qp_ex* qp) {
  qp_of(qp)->building_lock.lock();
  qp_of(qp)->building.clear();
}
int wr_complete(ibv_qp_ex* qp) {
  Qp* q = qp_of(qp);
  const int code = Nic::get().post(q, std::move(q->building));
  q->building.clear();
  q->building_lock.unlock();
  return code;
}
void wr_abort(ibv_qp_ex* qp) {
  qp_of(qp)->building.clear();
  qp_of(qp)->building_lock.unlock();
}
void wr_send(ibv_qp_ex* qp) { begin(qp, Operation::kSend); }
void wr_send_imm(ibv_qp_ex* qp, __be32 imm) {
  Operation& op = begin(qp, Operation::kSend);
  op.has_imm = true, op.imm = imm;
}
void wr_rdma_read(ibv_qp_ex* qp, uint32_t rkey, uint64_t address) {
  Operation& op = begin(qp, Operation::kRead);
  op.rkey = rkey, op.remote_address = address;
}
void wr_rdma_write(ibv_qp_ex* qp, uint32_t rkey, uint64_t address) {
  Operation& op = begin(qp, Operation::kWrite);
  op.rkey = rkey, op.remote_address = address;
}
void wr_rdma_write_imm(ibv_qp_ex* qp, uint32_t rkey, uint64_t address, __be32 imm) {
  wr_rdma_write(qp, rkey, address);
  qp_of(qp)->building.back().has_imm = true, qp_of(qp)->building.back().imm = imm;
}
void set_ud_addr(ibv_qp_ex* qp, ibv_ah* ah, uint32_t qpn, uint32_t qkey) {
  Operation& op = qp_of(qp)->building.back();
  op.gid = reinterpret_cast<Ah*>(ah)->gid, op.remote_qpn = qpn, op.remote_qkey = qkey;
}
void set_sge_list(ibv_qp_ex* qp, size_t n, const ibv_sge* list) {
  qp_of(qp)->building.back().sges.assign(list, list + n);
}
void set_sge(ibv_qp_ex* qp, uint32_t lkey, uint64_t address, uint32_t length) {
  qp_of(qp)->building.back().sges.assign(1, {address, length, lkey});
}
void set_inline(ibv_qp_ex* qp, void* address, size_t length) {
  Operation& op = qp_of(qp)->building.back();
  op.is_inline = true;
  op.inlined.assign(static_cast<char*>(address), length);
}
void set_inline_list(ibv_qp_ex* qp, size_t n, const ibv_data_buf* list) {
  Operation& op = qp_of(qp)->building.back();
  op.is_inline = true;
  op.inlined.clear();
  for (size_t i = 0; i < n; ++i) op.inlined.append(static_cast<char*>(list[i].addr), list[i].length);
}

int post_send(ibv_qp* plain, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
  Qp* qp = reinterpret_cast<Qp*>(plain);
  for (; wr; wr = wr->next) {
    Operation op;
    op.kind = Operation::kSend, op.qp = qp, op.wr_id = wr->wr_id;
    op.gid = reinterpret_cast<Ah*>(wr->wr.ud.ah)->gid;
    op.remote_qpn = wr->wr.ud.remote_qpn, op.remote_qkey = wr->wr.ud.remote_qkey;
    op.has_imm = wr->opcode == IBV_WR_SEND_WITH_IMM, op.imm = wr->imm_data;
    op.is_inline = wr->send_flags & IBV_SEND_INLINE;
    for (int i = 0; i < wr->num_sge; ++i) {
      const ibv_sge& sge = wr->sg_list[i];
      if (op.is_inline) op.inlined.append(reinterpret_cast<char*>(sge.addr), sge.length);
      else op.sges.push_back(sge);
    }
    std::vector<Operation> one;
    one.push_back(std::move(op));
    if (const int code = Nic::get().post(qp, std::move(one))) {
      *bad_wr = wr;
      return code;
    }
  }
  return 0;
}

int post_recv(ibv_qp* plain, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  SharedQp& shared = *reinterpret_cast<Qp*>(plain)->shared;
  Lock held(shared.lock);
  for (; wr; wr = wr->next) {
    if (shared.posted - shared.taken >= kRqDepth || wr->num_sge > int(kRqSges)) {
      *bad_wr = wr;
      return bad(shared.posted - shared.taken >= kRqDepth ? ENOMEM : EINVAL);
    }
    Receive& receive = shared.receives[shared.posted++ % kRqDepth];
    receive.wr_id = wr->wr_id;
    receive.sges = uint32_t(wr->num_sge);
    std::copy(wr->sg_list, wr->sg_list + wr->num_sge, receive.sge);
  }
  return 0;
}

int req_notify_cq(ibv_cq*, int) { return 0; }

ibv_cq_ex* context_create_cq(ibv_context* context, ibv_cq_init_attr_ex* attr) { return make_cq(context, attr); }

int query_device_extended(ibv_context* context, const ibv_query_device_ex_input*, ibv_device_attr_ex* attr,
                          size_t size) {
  memset(attr, 0, size);
  return query_device(context, &attr->orig_attr);
}

ibv_qp* make_qp(ibv_context* context, ibv_pd* pd, ibv_cq* send_cq, ibv_cq* recv_cq, void* user, uint32_t depth,
                bool unsolicited) {
  Cq *to_send = reinterpret_cast<Cq*>(send_cq), *to_recv = reinterpret_cast<Cq*>(recv_cq);
  SharedProcess& own = Nic::get().own();
  const uint32_t at = Nic::get().reserve_qp(uint32_t(to_recv->shared - own.cqs), 0, unsolicited);
  if (at == kMaxQps) {
    errno = ENOMEM;
    return nullptr;
  }
  Qp* qp = new Qp;
  qp->shared = &own.qps[at];
  qp->gid = Nic::get().gid(context_of(context)->device->index);
  qp->send_cq = to_send, qp->recv_cq = to_recv;
  qp->depth = depth ? std::min(depth, kSqDepth) : kSqDepth;
  ibv_qp_ex& b = qp->base;
  b.qp_base.context = context, b.qp_base.pd = pd, b.qp_base.send_cq = send_cq, b.qp_base.recv_cq = recv_cq;
  b.qp_base.qp_context = user, b.qp_base.qp_num = qp->shared->number, b.qp_base.qp_type = IBV_QPT_DRIVER;
  b.qp_base.state = IBV_QPS_RESET;
  b.wr_start = wr_start, b.wr_complete = wr_complete, b.wr_abort = wr_abort, b.wr_send = wr_send;
  b.wr_send_imm = wr_send_imm, b.wr_rdma_read = wr_rdma_read, b.wr_rdma_write = wr_rdma_write;
  b.wr_rdma_write_imm = wr_rdma_write_imm, b.wr_set_ud_addr = set_ud_addr, b.wr_set_sge = set_sge;
  b.wr_set_sge_list = set_sge_list, b.wr_set_inline_data = set_inline, b.wr_set_inline_data_list = set_inline_list;
  return &b.qp_base;
}

ibv_mr* make_mr(ibv_pd* pd, void* address, size_t length, uint64_t access) {
  static std::atomic<uint32_t> turns{1};
  SharedProcess& own = Nic::get().own();
  for (uint32_t tries = 0; tries < kMaxMrs; ++tries) {
    const uint32_t key = turns++;
    SharedMr& mr = own.mrs[key % kMaxMrs];
    uint64_t free = 0;
    if (!key || !mr.live.compare_exchange_strong(free, ~uint64_t(0))) continue;
    mr.address = reinterpret_cast<uint64_t>(address), mr.length = length, mr.access = uint32_t(access);
    mr.live = key;
    ibv_mr* made = new ibv_mr{};
    made->context = pd->context, made->pd = pd, made->addr = address, made->length = length;
    made->lkey = made->rkey = key;
    return made;
  }
  errno = ENOMEM;
  return nullptr;
}

} // namespace

API ibv_device** ibv_get_device_list(int* count) {
  auto** list = static_cast<ibv_device**>(calloc(devices().size() + 1, sizeof(ibv_device*)));
  for (size_t i = 0; i < devices().size(); ++i) list[i] = &devices()[i].base;
  if (count) *count = int(devices().size());
  return list;
}
API void ibv_free_device_list(ibv_device** list) { free(list); }
API const char* ibv_get_device_name(ibv_device* device) { return device->name; }
API int ibv_fork_init() { return 0; }
API ibv_fork_status ibv_is_fork_initialized() { return IBV_FORK_UNNEEDED; }

API ibv_context* ibv_open_device(ibv_device* device) {
  Context* made = new Context;
  made->device = reinterpret_cast<Device*>(device);
  verbs_context& v = made->extended;
  v.sz = sizeof(verbs_context);
  v.query_port = query_port;
  v.create_cq_ex = context_create_cq;
  v.query_device_ex = query_device_extended;
  v.context.device = device;
  v.context.cmd_fd = v.context.async_fd = -1;
  v.context.num_comp_vectors = 1;
  v.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  v.context.ops.poll_cq = poll_cq, v.context.ops.req_notify_cq = req_notify_cq;
  v.context.ops.post_send = post_send, v.context.ops.post_recv = post_recv;
  return &v.context;
}
API int ibv_close_device(ibv_context* context) {
  delete context_of(context);
  return 0;
}
API int ibv_query_device(ibv_context* context, ibv_device_attr* attr) { return query_device(context, attr); }
#undef ibv_query_port
API int ibv_query_port(ibv_context* context, uint8_t port, struct _compat_ibv_port_attr* attr) {
  return query_port(context, port, reinterpret_cast<ibv_port_attr*>(attr), sizeof(ibv_port_attr));
}
API int ibv_query_gid(ibv_context* context, uint8_t, int, ibv_gid* gid) {
  *gid = Nic::get().gid(context_of(context)->device->index);
  return 0;
}
API int ibv_query_pkey(ibv_context*, uint8_t, int, __be16* key) {
  *key = 0xffff;
  return 0;
}
API ibv_pd* ibv_alloc_pd(ibv_context* context) {
  ibv_pd* made = new ibv_pd{};
  made->context = context;
  return made;
}
API int ibv_dealloc_pd(ibv_pd* pd) {
  delete pd;
  return 0;
}
#undef ibv_reg_mr
API ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t length, int access) {
  return make_mr(pd, address, length, unsigned(access));
}
API ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t length, uint64_t, unsigned access) {
  return make_mr(pd, address, length, access);
}
API ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t, size_t length, uint64_t iova, int, int access) {
  if (options().dmabuf) return make_mr(pd, reinterpret_cast<void*>(iova), length, unsigned(access));
  errno = EOPNOTSUPP;
  return nullptr;
}
API int ibv_dereg_mr(ibv_mr* mr) {
  Nic::get().own().mrs[mr->rkey % kMaxMrs].live = 0;
  delete mr;
  return 0;
}
#undef ibv_create_cq
API ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void* user, ibv_comp_channel* channel, int) {
  ibv_cq_init_attr_ex attr{};
  attr.cqe = uint32_t(cqe), attr.cq_context = user, attr.channel = channel;
  return ibv_cq_ex_to_cq(make_cq(context, &attr));
}
API int ibv_destroy_cq(ibv_cq* plain) {
  Cq* cq = reinterpret_cast<Cq*>(plain);
  {
    Lock held(cq->shared->lock);
    cq->shared->live = 0;
  }
  delete cq;
  return 0;
}
API ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  Ah* made = new Ah;
  made->base.context = pd->context, made->base.pd = pd;
  made->gid = attr->grh.dgid;
  made->number = Nic::get().ah_number(made->gid);
  return &made->base;
}
API int ibv_destroy_ah(ibv_ah* ah) {
  delete reinterpret_cast<Ah*>(ah);
  return 0;
}
API ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return reinterpret_cast<ibv_qp_ex*>(qp); }
API ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  return make_qp(pd->context, pd, attr->send_cq, attr->recv_cq, attr->qp_context, attr->cap.max_send_wr, false);
}
API int ibv_modify_qp(ibv_qp* plain, ibv_qp_attr* attr, int mask) {
  Qp* qp = reinterpret_cast<Qp*>(plain);
  if (mask & IBV_QP_STATE) plain->state = attr->qp_state;
  if (mask & IBV_QP_RNR_RETRY) qp->rnr_retry = attr->rnr_retry;
  if (mask & IBV_QP_QKEY) {
    Lock held(qp->shared->lock);
    qp->shared->qkey = attr->qkey;
  }
  return 0;
}
API int ibv_query_qp(ibv_qp* plain, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
  *attr = {};
  attr->qp_state = plain->state;
  if (init) *init = {};
  return 0;
}
API int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, uint32_t) { return 0; }
API int ibv_destroy_qp(ibv_qp* plain) {
  Qp* qp = reinterpret_cast<Qp*>(plain);
  {
    Lock held(qp->shared->lock);
    qp->shared->live = 0;
  }
  Nic::get().drop(qp);
  delete qp;
  return 0;
}
API const char* ibv_wc_status_str(ibv_wc_status status) { return status == IBV_WC_SUCCESS ? "success" : "error"; }

API int efadv_query_device(ibv_context*, efadv_device_attr* attr, uint32_t length) {
  efadv_device_attr filled{};
  filled.max_sq_wr = kSqDepth, filled.max_rq_wr = kRqDepth, filled.max_sq_sge = kSqSges, filled.max_rq_sge = kRqSges;
  filled.inline_buf_size = kInline;
  filled.device_caps = kRdmaRead | kRnrRetry | kCqWithSgid | (options().writes() ? kRdmaWrite | kUnsolicited : 0);
  filled.max_rdma_size = kMaxRdma;
  memset(attr, 0, length);
  memcpy(attr, &filled, std::min<size_t>(length, sizeof filled));
  return 0;
}
API int efadv_query_ah(ibv_ah* ah, efadv_ah_attr* attr, uint32_t length) {
  memset(attr, 0, length);
  attr->ahn = reinterpret_cast<Ah*>(ah)->number;
  return 0;
}
API ibv_cq_ex* efadv_create_cq(ibv_context* context, ibv_cq_init_attr_ex* attr, efadv_cq_init_attr*, uint32_t) {
  return make_cq(context, attr);
}
API efadv_cq* efadv_cq_from_ibv_cq_ex(ibv_cq_ex* cq) { return &reinterpret_cast<Cq*>(cq)->efa; }
API ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* attr, efadv_qp_init_attr* efa,
                               uint32_t length) {
  uint16_t flags = 0; // newer headers have it in the reserved bytes
  if (length >= offsetof(efadv_qp_init_attr, reserved) + sizeof flags) memcpy(&flags, efa->reserved, sizeof flags);
  if ((flags & kQpUnsolicited) && !options().writes()) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  return make_qp(context, attr->pd, attr->send_cq, attr->recv_cq, attr->qp_context, attr->cap.max_send_wr,
                 flags & kQpUnsolicited);
}
API ibv_qp* efadv_create_driver_qp(ibv_pd* pd, ibv_qp_init_attr* attr, uint32_t) { return ibv_create_qp(pd, attr); }
