// The Transport over libfabric: rails, peers' addresses, and memory regions with their keys.
#include "provider.h"
#include "rail.h"
#include "transport.h"

#include "blob.h"

namespace tsn::fabric {
namespace {
constexpr uint32_t kAddressMagic = 0x54534e41; // "TSNA"
constexpr uint32_t kKeyMagic = 0x54534e4b;     // "TSNK"
constexpr uint64_t kMostRails = 1024;
void warn_of_emulated_writes(const std::string& provider) {
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true))
    fprintf(stderr,
            "tilescale_net: warning: provider %s emulates RDMA writes by copies at the target, which is slow; update "
            "the EFA installer (libfabric 1.18 or later) and use a NIC with RDMA write\n",
            provider.c_str());
}

class LibfabricTransport final : public Transport {
public:
  explicit LibfabricTransport(const TransportOptions& options)
      : library_(load_library(options.library, options.library_fallback)),
        selection_(select_provider(library_, options)), n_rails_(static_cast<int>(selection_.rails.size())) {
    Properties& p = properties_;
    p.device_memory = selection_.device_memory;
    for (int r = 0; r < n_rails_; ++r) {
      rails_.push_back(
          std::make_unique<Rail>(library_, selection_.rails[r].get(), options, r, selection_.device_memory));
      p.device_memory = p.device_memory && rails_.back()->device_memory();
      const fi_info* info = rails_.back()->info();
      // A NIC that carries several rails counts once.
      const bool repeated =
          ("," + p.interface + ",").find("," + std::string(info->domain_attr->name) + ",") != std::string::npos;
      if (!repeated && info->nic && info->nic->link_attr)
        p.link_gbps += static_cast<double>(info->nic->link_attr->speed) / 1e9;
      p.interface += (r ? "," : "") + std::string(info->domain_attr->name);
    }
    const Rail& rail = *rails_[0];
    const fi_info* info = rail.info();
    p.provider = provider_name(info);
    p.version = library_.version_text;
    p.library = library_.path;
    p.rails = n_rails_;
    p.max_send = rail.max_send();
    p.max_write = max_write_ = rail.max_rma();
    p.max_message = rail.max_message();
    p.inject_bytes = rail.inject_bytes();
    p.depth = rail.depth();
    p.imm_bits = 32;
    p.immediates = rail.immediates();
    for (const auto& each : rails_) p.immediates = std::min(p.immediates, each->immediates());
    p.delivery_complete = selection_.delivery_complete;
    p.ordered_messages = (info->tx_attr->msg_order & FI_ORDER_SAS) && (info->rx_attr->msg_order & FI_ORDER_SAS);
    p.emulated_write = rail.emulated_write();
    if (p.emulated_write) warn_of_emulated_writes(p.provider);
    p.doorbells = rail.is_efa();
    p.remote_progress = info->domain_attr->data_progress != FI_PROGRESS_AUTO;
  }
  ~LibfabricTransport() override {
    for (auto& rail : rails_)
      if (!rail->binds_memory_to_endpoint()) rail->close_endpoint();
    mrs_.clear();
  }

  const Properties& properties() const override { return properties_; }
  std::string address() const override {
    BlobWriter blob(kAddressMagic);
    blob.text(properties_.provider);
    blob.number(rails_.size());
    for (const auto& rail : rails_) {
      blob.text(rail->name());
      blob.number(rail->token());
    }
    return blob.take();
  }
  void connect(int peer, const std::string& address) override {
    if (peer < 0) throw FabricError(concat("connect: peer ", peer, " is negative"));
    BlobReader blob(address, kAddressMagic, concat("the address of peer ", peer));
    const std::string provider = blob.text();
    if (provider != properties_.provider)
      throw FabricError(concat("peer ", peer, " uses provider '", provider, "', this process '", properties_.provider,
                               "': set TSN_PROVIDER alike on all hosts"));
    const uint64_t count = blob.number();
    if (count < 1 || count > kMostRails)
      throw FabricError(concat("the address of peer ", peer, " has ", count, " rails; there may be 1 to ", kMostRails));
    std::vector<std::string> theirs(count);
    std::vector<uint64_t> tokens(count);
    for (uint64_t i = 0; i < count; ++i) {
      theirs[i] = blob.text();
      tokens[i] = blob.number();
    }

    const size_t at = static_cast<size_t>(peer) * n_rails_;
    if (peers_.size() < at + n_rails_) peers_.resize(at + n_rails_, FI_ADDR_UNSPEC);
    if (peers_[at] != FI_ADDR_UNSPEC) throw FabricError(concat("peer ", peer, " is connected already"));
    // Rail r sends to their rail r % theirs; their rails must be known here before they send.
    const int n_theirs = static_cast<int>(theirs.size());
    for (int r = 0; r < n_rails_; ++r) {
      peers_[at + r] = rails_[r]->insert(theirs[r % n_theirs]);
      rails_[r]->expect_messages_from(peer, tokens[r % n_theirs]);
      for (int s = 0; s < n_theirs; ++s)
        if (s != r % n_theirs && s % n_rails_ == r) rails_[r]->insert(theirs[s]);
    }
  }
  Region register_memory(const Memory& memory) override {
    if (!memory.base || !memory.bytes)
      throw FabricError(
          concat("registering memory: ", memory.bytes, " bytes at a ", memory.base ? "valid" : "null", " address"));
    if (memory.kind == Memory::cuda && !properties_.device_memory)
      throw FabricError("provider '" + properties_.provider +
                        "' cannot register GPU memory: stage through pinned host memory");
    std::vector<Fid<fid_mr>> mrs;
    for (auto& rail : rails_) mrs.push_back(rail->register_memory(memory));
    for (auto& mr : mrs) {
      sources_.push_back(
          {static_cast<char*>(memory.base), memory.bytes, fi_mr_desc(mr.get()), memory.kind == Memory::host});
      mrs_.push_back(std::move(mr));
    }
    return static_cast<Region>(n_locals_++);
  }
  void release_memory(Region region) override {
    const size_t first = static_cast<size_t>(checked(region)) * n_rails_;
    for (int r = 0; r < n_rails_; ++r) {
      sources_[first + r].bytes = 0;
      mrs_[first + r].reset();
    }
  }
  std::string region_key(Region region) const override {
    const Source& memory = source(checked(region), 0);
    BlobWriter blob(kKeyMagic);
    blob.number(memory.bytes);
    blob.number(n_rails_);
    for (int r = 0; r < n_rails_; ++r) {
      blob.number(rails_[r]->remote_base(memory.base));
      blob.number(fi_mr_key(mrs_[static_cast<size_t>(region) * n_rails_ + r].get()));
    }
    return blob.take();
  }
  RemoteRegion add_remote(int peer, const std::string& key) override {
    if (!valid_peer(0, peer)) throw FabricError(concat("add_remote: peer ", peer, " is not connected"));
    BlobReader blob(key, kKeyMagic, concat("the memory key of peer ", peer));
    const uint64_t bytes = blob.number();
    const uint64_t count = blob.number();
    if (count < 1 || count > kMostRails)
      throw FabricError(concat("the memory key of peer ", peer, " has ", count, " rails"));
    std::vector<Target> theirs(count);
    for (Target& rail : theirs) {
      rail.base = blob.number();
      rail.key = blob.number();
    }
    for (int r = 0; r < n_rails_; ++r) {
      const Target& rail = theirs[r % theirs.size()];
      targets_.push_back({address_of(r, peer), rail.base, bytes, rail.key, peer});
    }
    return static_cast<RemoteRegion>(n_remotes_++);
  }

  Post post_write(const Copy& c) override {
    if (__builtin_expect(!valid(c), 0)) return refuse_copy(c);
    const Target& to = target(c.remote, c.rail);
    const Source& from = source(c.local, c.rail);
    Rail& rail = *rails_[c.rail];
    return forward(
        rail.write({c.peer, to.address, to.base + c.remote_offset, to.key}, from.base + c.local_offset, from.desc, c),
        rail);
  }
  Post post_read(const Copy& c) override {
    if (__builtin_expect(!valid(c), 0)) return refuse_copy(c);
    if (c.has_imm) return refuse("a read carries no immediate");
    const Target& from = target(c.remote, c.rail);
    const Source& to = source(c.local, c.rail);
    Rail& rail = *rails_[c.rail];
    return forward(
        rail.read({c.peer, from.address, from.base + c.remote_offset, from.key}, to.base + c.local_offset, to.desc, c),
        rail);
  }
  Post post_message(int rail, int peer, const void* data, uint32_t bytes, uint64_t cookie) override {
    if (!valid_peer(rail, peer)) return refuse_peer(rail, peer);
    if (bytes > properties_.max_message)
      return refuse(concat("a message of ", bytes, " bytes exceeds the limit of ", properties_.max_message));
    return forward(rails_[rail]->message(peer, address_of(rail, peer), data, bytes, cookie), *rails_[rail]);
  }
  Post post_send(int rail, int peer, Region region, uint64_t offset, uint64_t bytes, uint64_t cookie) override {
    if (!valid_peer(rail, peer)) return refuse_peer(rail, peer);
    if (!valid_source(rail, region, offset, bytes)) return refuse_source(region, offset, bytes);
    if (bytes > properties_.max_send)
      return refuse(concat("a send of ", bytes, " bytes exceeds the limit of provider '", properties_.provider, "', ",
                           properties_.max_send));
    const Source& from = source(region, rail);
    return forward(
        rails_[rail]->send(peer, address_of(rail, peer), from.base + offset, from.desc, bytes, cookie, from.on_host),
        *rails_[rail]);
  }
  Post post_receive(int rail, Region region, uint64_t offset, uint64_t bytes, uint64_t cookie) override {
    if (!valid_rail(rail)) return refuse_peer(rail, -1);
    if (properties_.max_message) return refuse("post_receive needs TransportOptions::message_buffers == 0");
    if (!valid_source(rail, region, offset, bytes)) return refuse_source(region, offset, bytes);
    const Source& to = source(region, rail);
    return forward(rails_[rail]->receive(to.base + offset, to.desc, bytes, cookie), *rails_[rail]);
  }
  int poll(Event* events, int capacity) override {
    for (auto& rail : rails_) rail->new_poll();
    if (n_rails_ == 1) return rails_[0]->poll(events, capacity);
    int n = 0;
    for (int i = 0; i < n_rails_ && n < capacity; ++i) {
      int r = first_rail_ + i;
      if (r >= n_rails_) r -= n_rails_;
      n += rails_[r]->poll(events + n, capacity - n);
    }
    if (++first_rail_ >= n_rails_) first_rail_ = 0;
    return n;
  }
  bool idle() const override {
    return std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->idle(); });
  }
  void abandon() override {
    if (selection_.shared_memory) selection_.shared_memory->remove();
  }
  uint64_t rejected_messages() const override {
    uint64_t n = 0;
    for (const auto& rail : rails_) n += rail->rejected_messages();
    return n;
  }
  uint64_t internal_failures(std::string* last) override {
    uint64_t n = 0;
    for (auto& rail : rails_) n += rail->internal_failures(last);
    return n;
  }
  const char* last_error() const override { return error_.c_str(); }

private:
  // A local region, or a peer's region, as posts on one rail use it. Both lie in flat arrays indexed by region *
  // rails + rail, so the data path follows few pointers.
  struct Source {
    char* base;
    uint64_t bytes; // 0 once released
    void* desc;
    bool on_host;
  };
  struct Target {
    fi_addr_t address;
    uint64_t base, bytes, key;
    int32_t peer;
  };

  bool valid_rail(int rail) const { return static_cast<uint32_t>(rail) < static_cast<uint32_t>(n_rails_); }
  bool valid_peer(int rail, int peer) const {
    return valid_rail(rail) && peer >= 0 && static_cast<size_t>(peer) * n_rails_ < peers_.size() &&
           address_of(rail, peer) != FI_ADDR_UNSPEC;
  }
  TSN_HOT bool valid_source(int rail, Region local, uint64_t offset, uint64_t bytes) const {
    if (static_cast<uint32_t>(local) >= n_locals_) return false;
    const Source& from = source(local, rail);
    return bytes && bytes <= from.bytes && offset <= from.bytes - bytes;
  }
  // A remote region belongs to a connected peer, so the peer needs no further check.
  TSN_HOT bool valid(const Copy& c) const {
    if (!valid_rail(c.rail) || static_cast<uint32_t>(c.remote) >= n_remotes_) return false;
    const Target& to = target(c.remote, c.rail);
    return valid_source(c.rail, c.local, c.local_offset, c.bytes) && to.peer == c.peer && c.bytes <= to.bytes &&
           c.remote_offset <= to.bytes - c.bytes && c.bytes <= max_write_;
  }
  fi_addr_t address_of(int rail, int peer) const { return peers_[static_cast<size_t>(peer) * n_rails_ + rail]; }
  const Source& source(Region local, int rail) const {
    return sources_[static_cast<uint32_t>(local) * static_cast<uint32_t>(n_rails_) + static_cast<uint32_t>(rail)];
  }
  const Target& target(RemoteRegion remote, int rail) const {
    return targets_[static_cast<uint32_t>(remote) * static_cast<uint32_t>(n_rails_) + static_cast<uint32_t>(rail)];
  }
  // Checks come first and in one expression; a failed one is diagnosed separately, off the data path.
  [[gnu::cold]] Post refuse(std::string why) {
    error_ = std::move(why);
    return Post::error;
  }
  [[gnu::cold]] Post refuse_copy(const Copy& c) {
    if (!valid_peer(c.rail, c.peer)) return refuse_peer(c.rail, c.peer);
    if (!valid_source(c.rail, c.local, c.local_offset, c.bytes)) return refuse_source(c.local, c.local_offset, c.bytes);
    if (c.bytes > max_write_)
      return refuse(
          concat(c.bytes, " bytes exceed the largest transfer of provider '", properties_.provider, "', ", max_write_));
    return refuse(concat("remote bytes [", c.remote_offset, ", +", c.bytes, ") are not inside region ", c.remote,
                         " of peer ", c.peer));
  }
  [[gnu::cold]] Post refuse_source(Region region, uint64_t offset, uint64_t bytes) {
    return refuse(concat("local bytes [", offset, ", +", bytes, ") are not inside region ", region));
  }
  [[gnu::cold]] Post refuse_peer(int rail, int peer) {
    if (!valid_rail(rail)) return refuse(concat("rail ", rail, " does not exist; there are ", n_rails_));
    return refuse(concat("peer ", peer, " is not connected"));
  }
  TSN_HOT Post forward(Post post, Rail& rail) {
    if (__builtin_expect(post == Post::error, 0)) error_ = rail.error;
    return post;
  }
  Region checked(Region region) const {
    if (static_cast<uint32_t>(region) >= n_locals_ || !source(region, 0).bytes)
      throw FabricError(concat("region ", region, " is not registered"));
    return region;
  }

  const Library& library_;
  Selection selection_;
  std::vector<std::unique_ptr<Rail>> rails_;
  int n_rails_ = 0;
  Properties properties_;
  int first_rail_ = 0; // where the next poll starts

  uint32_t n_locals_ = 0, n_remotes_ = 0;
  uint64_t max_write_ = 0;
  std::vector<Source> sources_;
  std::vector<Target> targets_;
  std::vector<fi_addr_t> peers_; // [peer * rails + rail], FI_ADDR_UNSPEC where not connected
  std::vector<Fid<fid_mr>> mrs_; // [region * rails + rail]
  std::string error_;
};

} // namespace

std::unique_ptr<Transport> make_libfabric(const TransportOptions& options) {
  return std::make_unique<LibfabricTransport>(options);
}

} // namespace tsn::fabric
