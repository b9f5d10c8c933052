// The text that configures the chaos transport.
#include "tilescale_net/csrc/testing/chaos.h"
#include <random>

namespace tsn::testing {

ChaosOptions parse_chaos(const std::string& text) {
  const std::string source = text == "on" ? "seed=1,reorder=0.3,split=0.2,eagain=0.1" : text;
  ChaosOptions options;
  struct Field {
    const char* name;
    double* probability;
    uint64_t* number;
  };
  uint64_t imm_bits = 32;
  const Field fields[] = {{"seed", nullptr, &options.seed},
                          {"reorder", &options.reorder, nullptr},
                          {"split", &options.split, nullptr},
                          {"eagain", &options.eagain, nullptr},
                          {"error", &options.error, nullptr},
                          {"delay_us", nullptr, &options.delay_us},
                          {"depth", nullptr, &options.depth},
                          {"max_write", nullptr, &options.max_write},
                          {"error_after", nullptr, &options.error_after},
                          {"error_code", nullptr, &options.error_code},
                          {"stall_after", nullptr, &options.stall_after},
                          {"imm_bits", nullptr, &imm_bits}};
  for (size_t at = 0; at < source.size();) {
    const size_t end = std::min(source.find(',', at), source.size());
    const std::string entry = source.substr(at, end - at);
    at = end + 1;
    const size_t equals = std::min(entry.find('='), entry.size());
    const std::string name = entry.substr(0, equals), value = entry.substr(std::min(equals + 1, entry.size()));
    const Field* field = nullptr;
    std::string known;
    for (const Field& f : fields) {
      if (name == f.name) field = &f;
      known += std::string(known.empty() ? "" : ", ") + f.name;
    }
    if (!field) throw FabricError("chaos: unknown field '" + name + "' in '" + text + "'; known are " + known);
    char* rest = nullptr;
    errno = 0;
    bool good = !value.empty() && std::strchr(".0123456789", value[0]); // no sign, no blanks
    if (field->probability) {
      *field->probability = std::strtod(value.c_str(), &rest);
      good = good && !*rest && *field->probability >= 0 && *field->probability <= 1;
    } else {
      *field->number = std::strtoull(value.c_str(), &rest, 10);
      good = good && !*rest && !errno;
    }
    if (!good)
      throw FabricError("chaos: '" + entry + "' is not " +
                        (field->probability ? "a probability between 0 and 1" : "a whole number") + " in '" + text +
                        "'");
  }
  if (imm_bits < 8 || imm_bits > 32) throw FabricError(concat("chaos: imm_bits=", imm_bits, " is outside 8 to 32"));
  if (options.error_code < 1 || options.error_code > 4095)
    throw FabricError(concat("chaos: error_code=", options.error_code, " is outside 1 to 4095"));
  options.imm_bits = static_cast<int>(imm_bits);
  return options;
}

namespace {

using Clock = std::chrono::steady_clock;

class ChaosTransport final : public Transport {
public:
  ChaosTransport(std::unique_ptr<Transport> inner, const ChaosOptions& options, int self)
      : inner_(std::move(inner)), options_(options), random_(options.seed * 0x9e3779b97f4a7c15ull + self),
        properties_(inner_->properties()) {
    properties_.provider = "chaos+" + properties_.provider;
    properties_.ordered_messages = false;
    properties_.imm_bits = std::min(properties_.imm_bits, options.imm_bits);
    if (options.depth) properties_.depth = std::min<uint32_t>(properties_.depth, options.depth);
    if (options.max_write) properties_.max_write = std::min(properties_.max_write, options.max_write);
    outstanding_.resize(properties_.rails, 0);
  }

  const Properties& properties() const override { return properties_; }
  std::string address() const override { return inner_->address(); }
  void connect(int peer, const std::string& address) override { inner_->connect(peer, address); }
  Region register_memory(const Memory& memory) override { return inner_->register_memory(memory); }
  void release_memory(Region region) override { inner_->release_memory(region); }
  std::string region_key(Region region) const override { return inner_->region_key(region); }
  RemoteRegion add_remote(int peer, const std::string& key) override { return inner_->add_remote(peer, key); }
  const char* last_error() const override { return error_.c_str(); }

  Post post_write(const Copy& copy) override {
    if (copy.has_imm && properties_.imm_bits < 32 && copy.imm >> properties_.imm_bits)
      return refuse(concat("immediate ", copy.imm, " does not fit ", properties_.imm_bits, " bits"));
    return post_copy(Op::write, copy);
  }

  Post post_read(const Copy& copy) override { return post_copy(Op::read, copy); }

  Post post_message(int rail, int peer, const void* data, uint32_t bytes, uint64_t cookie) override {
    if (bytes > properties_.max_message)
      return refuse(concat("a message of ", bytes, " bytes exceeds the limit of ", properties_.max_message));
    Op op;
    op.kind = Op::message;
    op.copy.rail = rail;
    op.copy.peer = peer;
    op.cookie = cookie;
    op.payload.assign(static_cast<const char*>(data), bytes);
    return start(std::move(op));
  }

  Post post_send(int rail, int peer, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie) override {
    Op op;
    op.kind = Op::send;
    op.copy.rail = rail;
    op.copy.peer = peer;
    op.copy.local = local;
    op.copy.local_offset = offset;
    op.copy.bytes = bytes;
    op.cookie = cookie;
    return start(std::move(op));
  }

  Post post_receive(int rail, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie) override {
    // A receive sends nothing: it is forwarded unchanged, under our own number.
    Op op;
    op.kind = Op::receive;
    op.cookie = cookie;
    op.remaining = 1;
    const uint64_t id = add(std::move(op));
    const Post post = inner_->post_receive(rail, local, offset, bytes, id);
    if (post != Post::ok) remove(id);
    if (post == Post::error) error_ = inner_->last_error();
    return post;
  }

  int poll(Event* events, int capacity) override {
    delivered_.clear();
    if (stalled_) return 0;
    release_due();
    int n = deliver_due(events, capacity);
    // Each event of the inner transport gives at most one here.
    std::vector<Event> fresh(std::max(1, capacity - n));
    const int got = n < capacity ? inner_->poll(fresh.data(), capacity - n) : 0;
    for (int i = 0; i < got; ++i) {
      Event event = fresh[i];
      const bool ours = (event.kind == Event::done || event.kind == Event::failed) && event.cookie != kSilent;
      if (ours && !finish_piece(event)) continue;
      if (roll(options_.reorder)) hold(event);
      else events[n++] = event;
    }
    return n;
  }

  uint64_t rejected_messages() const override { return inner_->rejected_messages(); }
  uint64_t internal_failures(std::string* last) override { return inner_->internal_failures(last); }
  void abandon() override { inner_->abandon(); }
  bool idle() const override {
    return arrivals_.empty() && std::all_of(outstanding_.begin(), outstanding_.end(), [](uint32_t n) { return !n; }) &&
           inner_->idle();
  }

private:
  struct Op {
    enum Kind : uint8_t { write, read, message, send, receive } kind = write;
    bool live = true;
    bool failed = false;
    Copy copy = {}; // as the caller posted it
    uint64_t cookie = kSilent;
    std::string payload;                      // of a message
    int remaining = 0;                        // pieces not yet completed
    bool last_waits = false;                  // a piece with the immediate follows when the others are done
    uint64_t tail_offset = 0, tail_bytes = 0; // that piece
    std::string text;                         // why it failed
    int code = 0;
  };
  struct Piece { // something to be posted on the inner transport
    uint64_t op;
    uint64_t offset, bytes;
    bool has_imm;
    Clock::time_point due;
  };
  struct Arrival { // an event to be handed out later
    Event event;
    std::string payload;
    Clock::time_point due;
  };

  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool roll(double probability) { return probability > 0 && uniform() < probability; }
  uint64_t below(uint64_t n) { return n ? random_() % n : 0; }
  Clock::time_point soon() {
    auto now = Clock::now();
    if (roll(options_.reorder)) now += std::chrono::nanoseconds(below(options_.delay_us * 1000 + 1));
    return now;
  }

  Post refuse(std::string why) {
    error_ = std::move(why);
    return Post::error;
  }

  uint64_t add(Op op) {
    if (free_.empty()) {
      free_.push_back(ops_.size());
      ops_.emplace_back();
    }
    const uint64_t id = free_.back();
    free_.pop_back();
    ops_[id] = std::move(op);
    return id;
  }

  void remove(uint64_t id) {
    ops_[id].live = false;
    free_.push_back(id);
  }

  Post post_copy(Op::Kind kind, const Copy& copy) {
    if (copy.bytes > properties_.max_write)
      return refuse(concat(copy.bytes, " bytes exceed the largest transfer, ", properties_.max_write));
    Op op;
    op.kind = kind;
    op.copy = copy;
    op.copy.more = op.copy.source_only = false; // a part that is done has arrived: the immediate waits for the others
    op.cookie = copy.cookie;
    return start(std::move(op));
  }

  Post start(Op op) {
    const int rail = op.copy.rail;
    if (rail < 0 || rail >= properties_.rails)
      return refuse(concat("rail ", rail, " does not exist; there are ", properties_.rails));
    if (roll(options_.eagain) || outstanding_[rail] >= properties_.depth) return Post::again;
    ++outstanding_[rail];
    ++count_;
    if (options_.stall_after && count_ >= options_.stall_after) stalled_ = true;
    const bool fails = (options_.error_after && count_ >= options_.error_after) || roll(options_.error);
    const bool split = op.kind == Op::write && op.copy.bytes > 1 && roll(options_.split) &&
                       (!op.copy.has_imm || properties_.delivery_complete);
    const uint64_t id = add(std::move(op));
    if (fails) {
      Op& failed = ops_[id];
      failed.failed = true;
      failed.code = static_cast<int>(options_.error_code);
      failed.text = concat("chaos: operation ", count_, " to peer ", failed.copy.peer, " fails on purpose");
      Event event = {};
      finish_op(id, event);
      hold(event);
    } else if (split) {
      cut(id);
    } else {
      ops_[id].remaining = 1;
      pieces_.push_back({id, 0, ops_[id].copy.bytes, ops_[id].copy.has_imm, soon()});
    }
    if (!stalled_) release_due();
    return Post::ok;
  }

  // Two to four pieces in any order; one that carries an immediate waits for the data of the others.
  void cut(uint64_t id) {
    Op& op = ops_[id];
    std::vector<uint64_t> cuts = {0, op.copy.bytes};
    for (uint64_t i = 1 + below(3); i > 0; --i) cuts.push_back(1 + below(op.copy.bytes - 1));
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::vector<Piece> pieces;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) pieces.push_back({id, cuts[i], cuts[i + 1] - cuts[i], false, soon()});
    std::shuffle(pieces.begin(), pieces.end(), random_);
    if (op.copy.has_imm) {
      op.last_waits = true;
      op.tail_offset = pieces.back().offset;
      op.tail_bytes = pieces.back().bytes;
      pieces.pop_back();
    }
    op.remaining = static_cast<int>(pieces.size());
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  }

  // Posts every due piece, each rail's in turn until it takes no more.
  void release_due() {
    const auto now = Clock::now();
    uint64_t full = 0; // rails that answered `again`
    size_t kept = 0;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece piece = pieces_[i];
      const uint64_t rail = 1ull << (ops_[piece.op].copy.rail % 64);
      if (piece.due > now || (full & rail)) pieces_[kept++] = piece;
      else if (!release(piece)) {
        full |= rail;
        pieces_[kept++] = piece;
      }
    }
    pieces_.resize(kept);
  }

  bool release(const Piece& piece) {
    Op& op = ops_[piece.op];
    Copy copy = op.copy;
    copy.local_offset += piece.offset;
    copy.remote_offset += piece.offset;
    copy.bytes = piece.bytes;
    copy.has_imm = piece.has_imm;
    copy.cookie = piece.op;
    Post post = Post::ok;
    switch (op.kind) {
    case Op::write:
      post = inner_->post_write(copy);
      break;
    case Op::read:
      post = inner_->post_read(copy);
      break;
    case Op::message:
      post = inner_->post_message(copy.rail, copy.peer, op.payload.data(), static_cast<uint32_t>(op.payload.size()),
                                  piece.op);
      break;
    default:
      post = inner_->post_send(copy.rail, copy.peer, copy.local, copy.local_offset, copy.bytes, piece.op);
    }
    if (post == Post::again) return false;
    if (post == Post::error) {
      texts_.push_back(inner_->last_error());
      Event event = {};
      event.kind = Event::failed;
      event.cookie = piece.op;
      event.code = EINVAL;
      event.text = texts_.back().c_str();
      if (finish_piece(event)) hold(event);
      texts_.pop_back();
    }
    return true;
  }

  // Accounts for one completed piece and rewrites `event` in the caller's terms; false before the operation's end.
  bool finish_piece(Event& event) {
    const uint64_t id = event.cookie;
    if (id >= ops_.size() || !ops_[id].live) return false;
    Op& op = ops_[id];
    if (event.kind == Event::failed && !op.failed) {
      op.failed = true;
      op.code = event.code;
      op.text = event.text ? event.text : "";
    }
    if (--op.remaining > 0) return false;
    if (op.last_waits && !op.failed) {
      op.last_waits = false;
      op.remaining = 1;
      pieces_.push_back({id, op.tail_offset, op.tail_bytes, true, soon()});
      return false;
    }
    return finish_op(id, event);
  }

  bool finish_op(uint64_t id, Event& event) {
    Op& op = ops_[id];
    event.kind = op.failed ? Event::failed : Event::done;
    event.cookie = op.cookie;
    event.text = nullptr;
    if (op.kind != Op::receive) {
      event.peer = op.copy.peer;
      event.rail = op.copy.rail;
      --outstanding_[op.copy.rail];
    }
    if (op.failed) {
      event.code = op.code;
      delivered_.push_back(std::move(op.text));
      event.text = delivered_.back().c_str();
    }
    remove(id);
    return op.failed || event.cookie != kSilent;
  }

  void hold(const Event& event) {
    Arrival arrival{event, "", soon()};
    if (event.kind == Event::message) arrival.payload.assign(static_cast<const char*>(event.data), event.bytes);
    if (event.text) arrival.payload = event.text;
    arrivals_.push_back(std::move(arrival));
  }

  int deliver_due(Event* events, int capacity) {
    const auto now = Clock::now();
    int n = 0;
    std::shuffle(arrivals_.begin(), arrivals_.end(), random_);
    for (size_t i = 0; i < arrivals_.size() && n < capacity;) {
      if (arrivals_[i].due > now) {
        ++i;
        continue;
      }
      events[n] = arrivals_[i].event;
      delivered_.push_back(std::move(arrivals_[i].payload));
      if (events[n].kind == Event::message) events[n].data = delivered_.back().data();
      if (events[n].text) events[n].text = delivered_.back().c_str();
      ++n;
      std::swap(arrivals_[i], arrivals_.back());
      arrivals_.pop_back();
    }
    return n;
  }

  const std::unique_ptr<Transport> inner_;
  const ChaosOptions options_;
  std::mt19937_64 random_;
  Properties properties_;
  std::vector<uint32_t> outstanding_; // per rail
  uint64_t count_ = 0;
  bool stalled_ = false;
  std::deque<Op> ops_;
  std::vector<uint64_t> free_;
  std::vector<Piece> pieces_;
  std::vector<Arrival> arrivals_;
  std::deque<std::string> delivered_; // payloads of the last poll's events
  std::deque<std::string> texts_;
  std::string error_;
};

} // namespace

std::unique_ptr<Transport> make_chaos(std::unique_ptr<Transport> inner, const ChaosOptions& options, int self) {
  return std::make_unique<ChaosTransport>(std::move(inner), options, self);
}

} // namespace tsn::testing
